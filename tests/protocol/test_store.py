"""Reading, writing and transactions against a real etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from everstep.protocol.store import LeaseNotFound, Put, Store, StoreError, StoreSettings, Unchanged
from tests.coroutines import in_event_loop


@asynccontextmanager
async def connected(settings: StoreSettings) -> AsyncIterator[Store]:
    store = await Store.connect(settings)
    try:
        yield store
    finally:
        await store.close()


@in_event_loop
async def test_round_trip(store_settings: StoreSettings) -> None:
    key = f"{store_settings.root}/a"
    async with connected(store_settings) as store:
        assert store.silence_s is None
        assert await store.get(key) is None
        revision = await store.put(key, b"\x00\xff value")
        item = await store.get(key)
        assert item is not None
        assert (item.key, item.value, item.lease) == (key, b"\x00\xff value", 0)
        assert item.mod_revision == item.create_revision == revision
        second = await store.put(key, b"")
        item = await store.get(key)
        assert item is not None
        assert (item.value, item.mod_revision, item.create_revision) == (b"", second, revision)
        await store.delete(key)
        await store.delete(key)
        assert await store.get(key) is None
        assert store.silence_s is not None
        assert store.silence_s < 1.0


@in_event_loop
async def test_list_is_the_prefix_sorted_and_nothing_else(store_settings: StoreSettings) -> None:
    root = store_settings.root
    async with connected(store_settings) as store:
        for name in ("jobs/b", "jobs/a", "jobs0", "job"):
            await store.put(f"{root}/{name}", name.encode())
        snapshot = await store.list(f"{root}/jobs/")
        assert [(item.key, item.value) for item in snapshot.items] == [
            (f"{root}/jobs/a", b"jobs/a"),
            (f"{root}/jobs/b", b"jobs/b"),
        ]
        assert snapshot.revision >= max(item.mod_revision for item in snapshot.items)
        assert (await store.list(f"{root}/none/")).items == ()


@in_event_loop
async def test_list_of_more_than_one_page(store_settings: StoreSettings) -> None:
    keys = [f"{store_settings.root}/many/{i:05d}" for i in range(2100)]
    async with connected(store_settings) as store:
        for start in range(0, len(keys), 100):
            assert await store.transaction([], [Put(key, b"x") for key in keys[start : start + 100]])
        assert [item.key for item in (await store.list(f"{store_settings.root}/many/")).items] == keys


@in_event_loop
async def test_transaction_holds_or_does_nothing(store_settings: StoreSettings) -> None:
    a, b, c = (f"{store_settings.root}/{name}" for name in "abc")
    async with connected(store_settings) as store:
        first = await store.transaction([Unchanged(a, 0)], [Put(a, b"1"), Put(b, b"1")])
        assert first is not None
        assert await store.transaction([Unchanged(a, 0)], [Put(a, b"2"), Put(c, b"2")]) is None
        assert await store.get(c) is None

        second = await store.transaction([Unchanged(a, first), Unchanged(c, 0)], [Put(a, b"3")], deletes=[b])
        assert second is not None
        assert second > first
        assert await store.get(b) is None
        # b was deleted: its old revision no longer holds, "does not exist" does.
        assert await store.transaction([Unchanged(b, first)], [Put(c, b"4")]) is None
        assert await store.transaction([Unchanged(a, second), Unchanged(b, 0)], [Put(c, b"4")]) is not None
        item = await store.get(a)
        assert item is not None
        assert (item.value, item.mod_revision) == (b"3", second)


@in_event_loop
async def test_what_etcd_refuses_is_an_error_not_an_outage(store_settings: StoreSettings) -> None:
    key = f"{store_settings.root}/a"
    async with connected(store_settings) as store:
        with pytest.raises(StoreError, match="duplicate key") as refused:
            await store.transaction([], [Put(key, b"1"), Put(key, b"2")])
        assert type(refused.value) is StoreError
        with pytest.raises(LeaseNotFound):
            await store.put(key, b"1", lease=12345)
        with pytest.raises(LeaseNotFound):
            await store.transaction([], [Put(key, b"1", lease=12345)])
        assert await store.get(key) is None


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("endpoints", StoreSettings(())),
        ("password", StoreSettings(("127.0.0.1:1",), username="a")),
        ("key_file", StoreSettings(("127.0.0.1:1",), ca_file="/ca", cert_file="/cert")),
        ("ca_file", StoreSettings(("127.0.0.1:1",), cert_file="/cert", key_file="/key")),
        ("ca_file", StoreSettings(("127.0.0.1:1",), ca_file="/nowhere/ca.pem")),
    ],
)
def test_settings_that_cannot_work_name_the_field(field: str, settings: StoreSettings) -> None:
    @in_event_loop
    async def connect() -> None:
        with pytest.raises(ValueError, match=field):
            await Store.connect(settings)

    connect()


def test_the_password_is_not_shown() -> None:
    assert "secret" not in repr(StoreSettings(("127.0.0.1:1",), username="a", password="secret"))
