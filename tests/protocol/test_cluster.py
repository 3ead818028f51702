"""Three members: the loss of one, the leader or a frozen one, passes the client by."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd3aio._protobuf import MaintenanceStub, StatusRequest

from everstep.protocol.etcd_server import find_etcd
from everstep.protocol.ports import free_port
from everstep.protocol.processes import spawn, terminate
from everstep.protocol.store import Change, Snapshot, Store, StoreSettings, StoreUnavailable
from tests.coroutines import in_event_loop, until
from tests.etcd import freeze


@pytest.fixture
def members(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Endpoint and process of each member."""
    clients = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    peers = [f"http://127.0.0.1:{free_port()}" for _ in range(3)]
    processes = {}
    for i, (client, peer) in enumerate(zip(clients, peers, strict=True)):
        settings = {
            "name": f"m{i}",
            "data-dir": str(tmp_path / f"m{i}"),
            "listen-client-urls": f"http://{client}",
            "advertise-client-urls": f"http://{client}",
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(f"m{j}={url}" for j, url in enumerate(peers)),
        }
        command = [str(find_etcd()), *(f"--{name}={value}" for name, value in settings.items())]
        processes[client] = spawn(command, log_path=tmp_path / f"m{i}.log")
    yield processes
    for process in processes.values():
        process.send_signal(signal.SIGCONT)
        terminate(process, 0.1)


async def leader_of(endpoints: tuple[str, ...]) -> str:
    for endpoint in endpoints:
        store = await Store.connect(StoreSettings((endpoint,)))
        try:
            status = await store._connection.call(lambda e: MaintenanceStub(e.channel).Status, StatusRequest())
        finally:
            await store.close()
        if status.leader == status.header.member_id:
            return endpoint
    raise AssertionError("no leader")


@in_event_loop
async def test_members_are_lost(members: dict[str, subprocess.Popen[bytes]]) -> None:
    endpoints = tuple(members)
    writer = await Store.connect(StoreSettings(endpoints, call_timeout_s=1.0))
    told: list[Change] = []
    snapshots = 0

    async def put(key: str) -> None:
        while True:
            try:
                await writer.put(key, b"x")
                return
            except StoreUnavailable:
                await asyncio.sleep(0.05)

    await asyncio.wait_for(put("/a/first"), 30.0)
    leader = await leader_of(endpoints)
    follower = next(endpoint for endpoint in endpoints if endpoint != leader)
    # The watch begins at the leader.
    watcher = await Store.connect(
        StoreSettings((leader, *(e for e in endpoints if e not in (leader, follower)), follower), call_timeout_s=1.0)
    )
    lease = await watcher.lease(5)
    lost = asyncio.create_task(lease.lost())

    async def follow() -> None:
        nonlocal snapshots
        async for entry in watcher.watch("/a/"):
            if isinstance(entry, Snapshot):
                snapshots += 1
            else:
                told.append(entry)

    following = asyncio.create_task(follow())
    await until(lambda: snapshots)
    for i in range(40):
        await put(f"/a/{i:03d}")
        if i == 20:
            # Its connections stand; that nothing comes any more is noticed long before pings would tell (9 s).
            freeze(members[leader])
    await until(lambda: len(told) >= 40, 6.0)
    members[leader].send_signal(signal.SIGCONT)
    leader = await leader_of(endpoints)
    follower = next(endpoint for endpoint in endpoints if endpoint != leader)
    for i in range(40, 120):
        await put(f"/a/{i:03d}")
        if i == 60:
            members[leader].kill()
    members[leader].wait()
    await until(lambda: told and told[-1].key == "/a/119")
    assert list(dict.fromkeys(change.key for change in told)) == [f"/a/{i:03d}" for i in range(120)]
    assert len({change.revision for change in told}) == len(told)
    assert snapshots == 1
    await until(lambda: lease.remaining_s > 3.0)
    assert not lost.done()

    # With a second one frozen nobody has a majority: no answer, and no wrong one.
    freeze(members[follower])
    with pytest.raises(StoreUnavailable):
        for _ in range(3):
            await writer.get("/a/first")
    members[follower].send_signal(signal.SIGCONT)
    await asyncio.wait_for(put("/a/last"), 10.0)
    await until(lambda: told[-1].key == "/a/last")
    await lease.close()
    await lost
    following.cancel()
    await asyncio.wait({following})
    await writer.close()
    await watcher.close()
