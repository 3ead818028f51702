"""The watch against a real etcd: every change once and in order, whatever happens to etcd in between."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from etcd3aio._protobuf import CompactionRequest

from everstep.protocol.etcd_server import PrivateEtcd
from everstep.protocol.store import Change, Put, Snapshot, Store, StoreSettings, StoreUnavailable
from tests.coroutines import in_event_loop, until
from tests.etcd import freeze
from tests.tcp_proxy import TcpProxy


class Follower:
    """Notes all that a watch yields, and the state that a reader of it holds."""

    def __init__(self) -> None:
        self.seen: list[Snapshot | Change] = []
        self.state: dict[str, bytes] = {}

    @property
    def changes(self) -> list[Change]:
        return [entry for entry in self.seen if isinstance(entry, Change)]

    @property
    def snapshots(self) -> list[Snapshot]:
        return [entry for entry in self.seen if isinstance(entry, Snapshot)]

    async def follow(self, store: Store, prefix: str, relist_interval_s: float = 300.0) -> None:
        async for entry in store.watch(prefix, relist_interval_s=relist_interval_s):
            self.seen.append(entry)
            if isinstance(entry, Snapshot):
                self.state = {item.key: item.value for item in entry.items}
            elif entry.item is None:
                self.state.pop(entry.key, None)
            else:
                self.state[entry.key] = entry.item.value


@asynccontextmanager
async def following(
    endpoint: str, prefix: str, call_timeout_s: float = 0.5, relist_interval_s: float = 300.0
) -> AsyncIterator[Follower]:
    store = await Store.connect(StoreSettings((endpoint,), call_timeout_s=call_timeout_s))
    follower = Follower()
    task = asyncio.create_task(follower.follow(store, prefix, relist_interval_s))
    try:
        await until(lambda: follower.seen or task.done())
        yield follower
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await store.close()


async def put_for_certain(store: Store, key: str, value: bytes) -> None:
    while True:
        try:
            await store.put(key, value)
            return
        except StoreUnavailable:
            await asyncio.sleep(0.05)


@in_event_loop
async def test_500_changes_in_order_and_only_those_below_the_prefix(store_settings: StoreSettings) -> None:
    root = store_settings.root
    store = await Store.connect(store_settings)
    before = await store.put(f"{root}/a/old", b"old")
    async with following(store_settings.endpoints[0], f"{root}/a/") as follower:
        expected: list[tuple[str, bytes | None]] = []
        for i in range(250):
            await store.put(f"{root}/a/{i % 7}", b"%d" % i)
            await store.put(f"{root}/b", b"not mine")
            expected.append((f"{root}/a/{i % 7}", b"%d" % i))
            if i % 2:
                await store.transaction([], [Put(f"{root}/a/x", b"%d" % i)], deletes=[f"{root}/a/{i % 7}"])
                expected += [(f"{root}/a/x", b"%d" % i), (f"{root}/a/{i % 7}", None)]
        assert len(expected) == 500
        await until(lambda: len(follower.changes) >= 500)
        await asyncio.sleep(0.1)
        assert [(c.key, None if c.item is None else c.item.value) for c in follower.changes] == expected
        revisions = [change.revision for change in follower.changes]
        assert revisions == sorted(revisions)
        assert [item.mod_revision for item in follower.snapshots[0].items] == [before]
        assert len(follower.snapshots) == 1
    await store.close()


@in_event_loop
async def test_no_change_is_lost_or_told_twice_when_etcd_is_killed(breakable_etcd: PrivateEtcd) -> None:
    store = await Store.connect(StoreSettings((breakable_etcd.endpoint,), call_timeout_s=0.5))
    async with following(breakable_etcd.endpoint, "/a/") as follower:
        for round_ in range(2):
            for i in range(20):
                await put_for_certain(store, f"/a/{round_}-{i}", b"x")
            breakable_etcd.process.kill()
            breakable_etcd.process.wait()
            await asyncio.sleep(0.3)
            breakable_etcd.start()
            # These race with the watch's own return.
            for i in range(20, 40):
                await put_for_certain(store, f"/a/{round_}-{i}", b"x")
        await until(lambda: len(follower.changes) >= 80)
        await asyncio.sleep(0.5)
        told = [(change.key, change.revision) for change in follower.changes]
        assert len(told) == len(set(told))
        # A put that was tried again may stand twice, under two revisions; in order of first appearance it is exact.
        assert list(dict.fromkeys(key for key, _ in told)) == [f"/a/{r}-{i}" for r in range(2) for i in range(40)]
        items = {item.key: item.mod_revision for item in (await store.list("/a/")).items}
        assert {change.key: change.revision for change in follower.changes} == items
        assert len(follower.snapshots) == 1  # it went on where it was: no need to list anew
    await store.close()


@in_event_loop
async def test_frozen_etcd_and_thawed(breakable_etcd: PrivateEtcd) -> None:
    store = await Store.connect(StoreSettings((breakable_etcd.endpoint,), call_timeout_s=0.5))
    async with following(breakable_etcd.endpoint, "/a/") as follower:
        await store.put("/a/before", b"x")
        freeze(breakable_etcd.process)
        await asyncio.sleep(2.5)
        breakable_etcd.process.send_signal(signal.SIGCONT)
        await put_for_certain(store, "/a/after", b"x")
        await until(lambda: len(follower.changes) >= 2, 4.0)
        assert [change.key for change in follower.changes] == ["/a/before", "/a/after"]
        assert len(follower.snapshots) == 1
    await store.close()


@in_event_loop
async def test_a_silent_network_is_noticed(private_etcd: PrivateEtcd, store_settings: StoreSettings) -> None:
    """Nothing passes, but no connection breaks: only the watch's own questions can tell."""
    root = store_settings.root
    direct = await Store.connect(store_settings)
    async with TcpProxy(private_etcd.endpoint) as proxy, following(proxy.endpoint, f"{root}/") as follower:
        await direct.put(f"{root}/a", b"1")
        await until(lambda: len(follower.changes) == 1)
        proxy.freeze()
        for i in range(5):
            await direct.put(f"{root}/b", b"%d" % i)
        await direct.delete(f"{root}/a")
        await asyncio.sleep(2.0)
        assert len(follower.changes) == 1
        proxy.heal()
        await until(lambda: len(follower.changes) == 7, 4.0)
        await asyncio.sleep(0.3)
        assert len(follower.changes) == 7
        assert follower.state == {f"{root}/b": b"4"}
    await direct.close()


@in_event_loop
async def test_a_connection_that_passes_nothing_any_more_is_replaced(
    private_etcd: PrivateEtcd, store_settings: StoreSettings
) -> None:
    """As after a router has forgotten it: it stands at both ends and never breaks."""
    key = f"{store_settings.root}/a"
    direct = await Store.connect(store_settings)
    async with TcpProxy(private_etcd.endpoint) as proxy, following(proxy.endpoint, store_settings.root) as follower:
        caller = await Store.connect(StoreSettings((proxy.endpoint,), call_timeout_s=0.5))
        lease = await caller.lease(5)
        proxy.strand()
        await direct.put(key, b"1")
        with pytest.raises(StoreUnavailable):
            await caller.get(key)
        assert await caller.get(key) is not None
        await until(lambda: len(follower.changes) == 1, 3.0)
        await until(lambda: lease.remaining_s > 4.5, 4.0)
        await lease.close()
        await caller.close()
    await direct.close()


@in_event_loop
async def test_compaction_while_cut_off_gives_a_new_snapshot(breakable_etcd: PrivateEtcd) -> None:
    direct = await Store.connect(StoreSettings((breakable_etcd.endpoint,)))
    await direct.put("/a/gone", b"x")
    async with TcpProxy(breakable_etcd.endpoint) as proxy, following(proxy.endpoint, "/a/") as follower:
        await direct.put("/a/kept", b"1")
        await until(lambda: len(follower.changes) == 1)
        proxy.cut()
        await direct.delete("/a/gone")
        await direct.put("/a/kept", b"2")
        revision = await direct.put("/a/new", b"3")
        await direct._connection.call(lambda endpoint: endpoint.kv.Compact, CompactionRequest(revision=revision))
        proxy.heal()
        await until(lambda: len(follower.snapshots) == 2, 5.0)
        assert follower.state == {"/a/kept": b"2", "/a/new": b"3"}
        await direct.put("/a/kept", b"4")
        await until(lambda: follower.state["/a/kept"] == b"4")
        assert len(follower.changes) == 2
    await direct.close()


@in_event_loop
async def test_an_etcd_that_lost_its_data_is_listed_anew(breakable_etcd: PrivateEtcd) -> None:
    """The new cluster's revisions start again below ours: waiting for the next of ours would last for ever."""
    store = await Store.connect(StoreSettings((breakable_etcd.endpoint,), call_timeout_s=0.5))
    async with following(breakable_etcd.endpoint, "/a/") as follower:
        for i in range(30):
            await store.put("/a/old", b"%d" % i)
        await until(lambda: len(follower.changes) == 30)
        breakable_etcd.process.kill()
        breakable_etcd.process.wait()
        shutil.rmtree(breakable_etcd.data_dir)
        breakable_etcd.start()
        await put_for_certain(store, "/a/new", b"1")
        await until(lambda: follower.state == {"/a/new": b"1"}, 5.0)
        await store.put("/a/new", b"2")
        await until(lambda: follower.state == {"/a/new": b"2"}, 5.0)
    await store.close()


@in_event_loop
async def test_now_and_then_it_is_listed_anew(store_settings: StoreSettings) -> None:
    root = store_settings.root
    store = await Store.connect(store_settings)
    async with following(store_settings.endpoints[0], f"{root}/", relist_interval_s=0.3) as follower:
        for i in range(40):
            await store.put(f"{root}/a", b"%d" % i)
            await asyncio.sleep(0.03)
        await until(lambda: follower.state.get(f"{root}/a") == b"39")
        assert len(follower.snapshots) >= 4
        # Each revision is told once: by a change, or covered by the snapshot that stands before the next change.
        position = 0
        for entry in follower.seen:
            if isinstance(entry, Change):
                assert entry.revision > position
            else:
                assert entry.revision >= position
            position = entry.revision
    await store.close()


@in_event_loop
async def test_watch_begun_while_etcd_is_away(breakable_etcd: PrivateEtcd) -> None:
    store = await Store.connect(StoreSettings((breakable_etcd.endpoint,), call_timeout_s=0.5))
    await store.put("/a/x", b"1")
    breakable_etcd.process.kill()
    breakable_etcd.process.wait()
    first = asyncio.ensure_future(anext(store.watch("/a/")))
    await asyncio.sleep(0.5)
    assert not first.done()
    breakable_etcd.start()
    snapshot = await asyncio.wait_for(first, 3.0)
    assert isinstance(snapshot, Snapshot)
    assert [item.key for item in snapshot.items] == ["/a/x"]
    await store.close()
