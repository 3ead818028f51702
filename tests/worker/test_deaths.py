"""Deaths of agents, warm parents, stores and etcd itself; each injected from outside."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from everstep.protocol.etcd_server import PrivateEtcd
from everstep.protocol.link import Verdict, hold, probe
from everstep.protocol.store import Store
from tests.worker.cluster import (
    KEYS,
    TOKEN,
    AgentProcess,
    alive,
    assert_all_end,
    children_named_sleep,
    descendants,
    end_job,
    eventually,
    heartbeat,
    kill,
    node_record,
    outcome,
    put_plan,
    stepping,
    wait_until,
    with_store,
)


def test_agent_killed_leaves_nothing_and_comes_back_at_once(other_agent: AgentProcess, etcd: PrivateEtcd) -> None:
    async def test(store: Store) -> None:
        other_agent.start()
        other_agent.wait_ready()
        await put_plan(store, "other", "orphans", "family")
        await stepping(store, "other", "orphans")

        async def born() -> bool:
            return len(children_named_sleep(other_agent.pid)) == 4

        await eventually(born)
        before = await node_record(store, "other")
        assert before is not None
        everybody = descendants(other_agent.pid)
        assert len(everybody) == 12  # agent, guardian, warm parent, store, and 2 ranks with 3 children each
        holder = asyncio.create_task(hold(before.host, before.port, TOKEN))
        await asyncio.sleep(0.1)

        kill(other_agent.pid)
        began = time.monotonic()
        other_agent.process.wait()
        await asyncio.wait_for(holder, 2.0)
        assert await probe(before.host, before.port, TOKEN, 1.0) is Verdict.REFUSED
        known_s = time.monotonic() - began
        assert known_s < 0.5
        assert_all_end(everybody - {other_agent.pid}, within_s=2.0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((before.host, before.meeting_port), timeout=1.0)

        # The dead agent's lease still runs, but nothing listens at its address: its successor need not wait.
        other_agent.start()
        other_agent.wait_ready()
        after = await node_record(store, "other")
        assert after is not None and after.incarnation != before.incarnation
        await store.delete(KEYS.plan("orphans"))

    with_store(etcd.endpoint, test)


def test_sigterm_ends_ranks_tells_outcomes_and_leaves(other_agent: AgentProcess, etcd: PrivateEtcd) -> None:
    async def test(store: Store) -> None:
        # A state directory whose path is too long for a socket.
        state = other_agent.directory / ("long" * 30)
        other_agent.start(state=state)
        other_agent.wait_ready()
        await put_plan(store, "other", "leave", "stubborn")
        await stepping(store, "other", "leave")
        everybody = descendants(other_agent.pid)
        other_agent.process.terminate()
        assert other_agent.process.wait(timeout=10) == 0
        assert not any(alive(pid) for pid in everybody)
        assert await store.get(KEYS.node("other")) is None
        assert await store.get(KEYS.beat("other")) is None
        found = await outcome(store, "other", "leave", 1, lambda found: found.all_gone)
        assert [end.stopped_by_us for end in found.exits] == [True, True]
        assert not list((state / "ranks").iterdir())
        await store.delete(KEYS.plan("leave"))

    with_store(etcd.endpoint, test)


def test_name_of_a_living_agent_is_refused(agent: AgentProcess, other_agent: AgentProcess) -> None:
    other_agent.node = "shared"
    other_agent.start()
    assert other_agent.process.wait(timeout=40) == 3
    text = other_agent.log_file.read_text()
    assert "node name 'shared' is held by a living agent" in text and str(agent.pid) in text
    assert agent.process.poll() is None


def test_state_directory_in_use_is_refused(agent: AgentProcess, other_agent: AgentProcess) -> None:
    other_agent.start(state=agent.directory / "state")
    assert other_agent.process.wait(timeout=30) == 3
    assert "used by another agent" in other_agent.log_file.read_text()


def test_entry_that_cannot_be_imported_is_told(other_agent: AgentProcess) -> None:
    other_agent.start("--entry", "tests.worker.no_such_module:main")
    assert other_agent.process.wait(timeout=40) == 4
    assert "No module named 'tests.worker.no_such_module'" in other_agent.log_file.read_text()


def test_sigterm_while_starting_leaves_nothing(other_agent: AgentProcess) -> None:
    other_agent.start()
    wait_until((other_agent.directory / "state" / "logs" / "warm-parent.log").exists)
    everybody = descendants(other_agent.pid)
    assert len(everybody) == 3
    other_agent.process.terminate()
    assert other_agent.process.wait(timeout=10) == 0
    assert not any(alive(pid) for pid in everybody)


def test_warm_parent_killed_is_told_and_replaced(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "cold", "family")
        ranks = await stepping(store, "shared", "cold")
        before = await node_record(store, "shared")
        assert before is not None
        warm_parent = _parent_of(ranks[0].pid)
        everybody = descendants(warm_parent)
        kill(warm_parent)
        found = await outcome(store, "shared", "cold", 1, lambda found: found.all_gone)
        assert not any(alive(pid) for pid in everybody)
        assert all(end.is_fault and "the warm parent died" in end.cause for end in found.exits)

        async def moved() -> bool:
            record = await node_record(store, "shared")
            return record is not None and record.meeting_port != before.meeting_port

        await eventually(moved, 30.0)
        await put_plan(store, "shared", "cold", "steps", generation=2)
        await stepping(store, "shared", "cold", 2)
        await end_job(store, "shared", "cold", 2)

    with_store(agent._endpoint, test)


def test_meeting_store_killed_is_replaced_and_ranks_go_on(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "store", "steps")
        ranks = await stepping(store, "shared", "store")
        before = await node_record(store, "shared")
        assert before is not None
        warm_parent = _parent_of(ranks[0].pid)
        (victim,) = descendants(warm_parent) - {warm_parent} - {rank.pid for rank in ranks}
        kill(victim)

        async def moved() -> int | None:
            record = await node_record(store, "shared")
            return record.meeting_port if record and record.meeting_port != before.meeting_port else None

        socket.create_connection(("127.0.0.1", await eventually(moved)), timeout=1.0).close()
        again = await stepping(store, "shared", "store")
        assert [rank.pid for rank in again] == [rank.pid for rank in ranks]
        await end_job(store, "shared", "store", 1)

    with_store(agent._endpoint, test)


def test_etcd_away_for_longer_than_the_lease_leaves_ranks_alone(agent: AgentProcess, etcd: PrivateEtcd) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "outage", "steps")
        ranks = await stepping(store, "shared", "outage")
        record = await node_record(store, "shared")
        assert record is not None
        kill(etcd.pid)
        await asyncio.sleep(3.0)
        victim = next(rank for rank in ranks if rank.rank == 1)
        kill(victim.pid)
        await asyncio.sleep(0.5)
        assert alive(ranks[0].pid) or alive(ranks[1].pid)
        etcd.start()

        # What happened meanwhile is told, and the node is there again under the same incarnation.
        found = await outcome(store, "shared", "outage", 1, lambda found: bool(found.exits))
        assert [(end.rank, end.signal) for end in found.exits] == [(1, 9)]
        survivor = next(rank for rank in ranks if rank.rank == 0)

        async def only_survivor() -> bool:
            beat = await heartbeat(store, "shared")
            return beat is not None and [rank.pid for rank in beat.ranks if rank.job == "outage"] == [survivor.pid]

        await eventually(only_survivor)

        async def back() -> bool:
            now, beat = await node_record(store, "shared"), await heartbeat(store, "shared")
            return bool(now and beat and now.incarnation == beat.incarnation == record.incarnation)

        await eventually(back)
        await end_job(store, "shared", "outage", 1)

    with_store(etcd.endpoint, test)


def test_frozen_agent_leaves_no_ghosts(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "ghosts", "steps")
        ranks = await stepping(store, "shared", "ghosts")
        record = await node_record(store, "shared")
        assert record is not None
        kill(agent.pid, signal.SIGSTOP)
        try:
            assert await probe(record.host, record.port, TOKEN, 0.3) is Verdict.SILENT
            assert_all_end({rank.pid for rank in ranks}, within_s=5.0)

            async def expired() -> bool:
                return await store.get(KEYS.node("shared")) is None

            await eventually(expired, 5.0)
        finally:
            kill(agent.pid, signal.SIGCONT)
        found = await outcome(store, "shared", "ghosts", 1, lambda found: found.all_gone)
        assert all(end.exit_code == 11 and end.is_fault for end in found.exits)

        async def back() -> bool:
            now = await node_record(store, "shared")
            return now is not None and now.incarnation == record.incarnation

        await eventually(back)
        await put_plan(store, "shared", "ghosts", "steps", generation=2)
        await stepping(store, "shared", "ghosts", 2)
        await end_job(store, "shared", "ghosts", 2)

    with_store(agent._endpoint, test)


def test_rank_that_was_stopped_for_long_goes_on(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "pause", "steps")
        ranks = await stepping(store, "shared", "pause")
        kill(ranks[0].pid, signal.SIGSTOP)
        await asyncio.sleep(3.5)  # longer than the silence that ends a rank
        kill(ranks[0].pid, signal.SIGCONT)
        await asyncio.sleep(0.3)
        assert all(alive(rank.pid) for rank in ranks)
        await end_job(store, "shared", "pause", 1)

    with_store(agent._endpoint, test)


def _parent_of(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) != os.getpid()
    return int(fields[1])
