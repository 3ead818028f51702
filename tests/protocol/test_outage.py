"""Etcd away: quick answers, little work, quick return."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

import pytest

from everstep.protocol.etcd_server import PrivateEtcd
from everstep.protocol.ports import free_port
from everstep.protocol.store import Put, Store, StoreSettings, StoreUnavailable, Unchanged
from tests.coroutines import in_event_loop, until
from tests.etcd import freeze


async def assert_unavailable(store: Store, within_s: float) -> None:
    for call in (
        lambda: store.get("/a"),
        lambda: store.list("/"),
        lambda: store.put("/a", b"1"),
        lambda: store.delete("/a"),
        lambda: store.transaction([Unchanged("/a", 0)], [Put("/a", b"1")]),
        lambda: store.lease(5),
    ):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await call()
        assert time.monotonic() - began < within_s


@in_event_loop
async def test_every_call_says_so_when_nobody_listens() -> None:
    store = await Store.connect(StoreSettings((f"127.0.0.1:{free_port()}",), call_timeout_s=2.0))
    await assert_unavailable(store, within_s=1.0)
    await store.close()


@in_event_loop
async def test_every_call_ends_in_time_when_etcd_is_frozen(breakable_etcd: PrivateEtcd) -> None:
    store = await Store.connect(StoreSettings((breakable_etcd.endpoint,), call_timeout_s=0.4))
    fresh = await Store.connect(StoreSettings((breakable_etcd.endpoint,), call_timeout_s=0.4))
    await store.put("/z", b"1")
    freeze(breakable_etcd.process)
    await assert_unavailable(store, within_s=0.7)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await fresh.get("/z")
    assert time.monotonic() - began < 0.7
    breakable_etcd.process.send_signal(signal.SIGCONT)
    await until(lambda: _answers(store), 3.0)
    await until(lambda: _answers(fresh), 3.0)
    await store.close()
    await fresh.close()


async def _answers(store: Store) -> bool:
    with contextlib.suppress(StoreUnavailable):
        await store.get("/z")
        return True
    return False


@in_event_loop
async def test_an_outage_costs_little_and_ends_soon_after_etcd_is_back(breakable_etcd: PrivateEtcd) -> None:
    store = await Store.connect(StoreSettings((breakable_etcd.endpoint,)))
    lease = await store.lease(3)
    watches = [store.watch(f"/{name}/") for name in "abc"]
    for watch in watches:
        await anext(watch)
    waiting = [asyncio.ensure_future(anext(watch)) for watch in watches]
    breakable_etcd.process.kill()
    breakable_etcd.process.wait()
    used = time.process_time()
    await asyncio.sleep(3.0)
    used = time.process_time() - used
    assert used < 0.3, f"{used:.2f} s of processor time in 3 s of outage"
    assert store.silence_s is not None
    assert store.silence_s > 2.9
    breakable_etcd.start()
    back_at = time.monotonic()
    await until(lambda: _answers(store))
    await until(lambda: lease.remaining_s > 0)
    assert time.monotonic() - back_at < 2.0
    for name in "abc":
        await store.put(f"/{name}/x", b"1")
    await asyncio.wait_for(asyncio.gather(*waiting), 2.0)
    await lease.close()
    for watch in watches:
        await watch.aclose()  # type: ignore[attr-defined]
    await store.close()


@in_event_loop
async def test_the_next_endpoint_steps_in(private_etcd: PrivateEtcd, breakable_etcd: PrivateEtcd) -> None:
    """Two servers that know nothing of each other stand for two members: what counts is who is asked."""
    nobody = f"127.0.0.1:{free_port()}"
    store = await Store.connect(
        StoreSettings((nobody, breakable_etcd.endpoint, private_etcd.endpoint), call_timeout_s=1.0)
    )
    await store.put("/test-next-endpoint", b"1")  # at once, past the one where nobody listens
    freeze(breakable_etcd.process)
    with pytest.raises(StoreUnavailable):
        await store.get("/test-next-endpoint")
    assert await store.get("/test-next-endpoint") is None  # the other one never heard of it
    breakable_etcd.process.send_signal(signal.SIGCONT)
    await store.close()
