"""Leases against a real etcd: kept, lost, given back."""

from __future__ import annotations

import asyncio
import time

import pytest

from everstep.protocol.etcd_server import PrivateEtcd
from everstep.protocol.store import Store, StoreSettings
from tests.coroutines import in_event_loop, until
from tests.tcp_proxy import TcpProxy


@in_event_loop
async def test_a_lease_is_kept_and_closing_it_deletes_its_keys(store_settings: StoreSettings) -> None:
    key = f"{store_settings.root}/leader"
    store = await Store.connect(store_settings)
    lease = await store.lease(1)
    assert lease.ttl_s == 1  # the private etcd grants what was asked for
    await store.put(key, b"me", lease=lease.id)
    item = await store.get(key)
    assert item is not None
    assert item.lease == lease.id
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        assert 0.3 < lease.remaining_s <= 1.0
        await asyncio.sleep(0.05)
    assert await store.get(key) is not None
    lost = asyncio.create_task(lease.lost())
    await lease.close()
    assert await store.get(key) is None
    await asyncio.wait_for(lost, 1.0)
    await lease.close()
    assert lease.remaining_s == 0.0
    await store.close()


@in_event_loop
async def test_the_lease_of_who_is_cut_off_ends_and_both_sides_learn_it(private_etcd: PrivateEtcd) -> None:
    root = "/test-cut-off"
    direct = await Store.connect(StoreSettings((private_etcd.endpoint,)))
    async with TcpProxy(private_etcd.endpoint) as proxy:
        holder = await Store.connect(StoreSettings((proxy.endpoint,), call_timeout_s=0.5))
        lease = await holder.lease(1)
        await holder.put(f"{root}/node", b"x", lease=lease.id)
        lost = asyncio.create_task(lease.lost())
        watch = direct.watch(f"{root}/")
        assert len((await anext(watch)).items) == 1  # type: ignore[union-attr]
        proxy.cut()
        cut_at = time.monotonic()
        change = await asyncio.wait_for(anext(watch), 5.0)
        gone_after_s = time.monotonic() - cut_at
        assert (change.key, change.item) == (f"{root}/node", None)  # type: ignore[union-attr]
        assert 0.5 < gone_after_s < 3.0
        assert lease.remaining_s == 0.0
        assert not lost.done()  # nobody has told the holder yet
        proxy.heal()
        await asyncio.wait_for(lost, 3.0)
        await watch.aclose()  # type: ignore[attr-defined]
        await lease.close()
        await holder.close()
    await direct.close()


@in_event_loop
async def test_a_lease_revoked_by_somebody_else_is_lost(store_settings: StoreSettings) -> None:
    store, other = await Store.connect(store_settings), await Store.connect(store_settings)
    lease = await store.lease(2)
    from etcd3aio._protobuf import LeaseRevokeRequest

    await other._connection.call(lambda endpoint: endpoint.leases.LeaseRevoke, LeaseRevokeRequest(ID=lease.id))
    await asyncio.wait_for(lease.lost(), 2.0)
    await store.close()
    await other.close()


@in_event_loop
async def test_a_lease_outlives_a_restart_of_etcd(breakable_etcd: PrivateEtcd) -> None:
    store = await Store.connect(StoreSettings((breakable_etcd.endpoint,), call_timeout_s=0.5))
    lease = await store.lease(2)
    await store.put("/node", b"x", lease=lease.id)
    lost = asyncio.create_task(lease.lost())
    breakable_etcd.process.kill()
    breakable_etcd.process.wait()
    await asyncio.sleep(3.0)  # longer than the lease: etcd does not count while it is away
    assert lease.remaining_s == 0.0
    breakable_etcd.start()
    await until(lambda: lease.remaining_s > 1.0, 5.0)
    assert not lost.done()
    item = await store.get("/node")
    assert item is not None
    await lease.close()
    await asyncio.wait_for(lost, 1.0)
    assert await store.get("/node") is None
    await store.close()


def test_a_lease_of_no_time_is_refused(store_settings: StoreSettings) -> None:
    @in_event_loop
    async def ask() -> None:
        store = await Store.connect(store_settings)
        with pytest.raises(ValueError, match="ttl_s"):
            await store.lease(0)
        await store.close()

    ask()
