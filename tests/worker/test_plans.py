"""From a plan in etcd to ranks on this node, and fencing between generations."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from pathlib import Path

from everstep.protocol.messages import CheckpointRecord, JobState, JobStatus
from everstep.protocol.store import Store
from tests.worker.cluster import (
    KEYS,
    AgentProcess,
    alive,
    end_job,
    eventually,
    heartbeat,
    node_record,
    outcome,
    put_plan,
    stepping,
    with_store,
)


def test_registers_and_beats(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        record = await node_record(store, "shared")
        assert record is not None
        assert record.pid == agent.pid == agent.ready["pid"]
        assert record.port == agent.ready["port"]
        for port in (record.port, record.meeting_port):
            socket.create_connection((record.host, port), timeout=1.0).close()
        assert [(device.kind, device.index) for device in record.devices] == [("cpu", 0), ("cpu", 1)]
        assert all(device.peak_flops > 1e9 and device.memory_bytes > 1e8 for device in record.devices)
        assert record.versions["torch"]
        for key in (KEYS.node("shared"), KEYS.beat("shared")):
            item = await store.get(key)
            assert item is not None and item.lease != 0

        first = await heartbeat(store, "shared")
        assert first is not None

        async def later() -> bool:
            beat = await heartbeat(store, "shared")
            return beat is not None and beat.sequence >= first.sequence + 2

        await eventually(later, 5.0)

    with_store(agent._endpoint, test)


def test_plan_starts_ranks_and_deleting_it_ends_them(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        began = time.time()
        await put_plan(store, "shared", "start", "steps")
        ranks = await stepping(store, "shared", "start")
        assert {rank.rank for rank in ranks} == {0, 1}
        assert {rank.device for rank in ranks} == {0, 1}
        # Each rank is the leader of a session of its own.
        assert all(os.getsid(rank.pid) == rank.pid for rank in ranks)
        assert all(rank.phase == "stepping" and rank.loss is not None for rank in ranks)
        rank_log = agent.directory / "state" / "logs" / "start" / "g1-r1.log"
        entered = re.search(r"rank 1 begins, entered ([\d.]+)", rank_log.read_text())
        assert entered and float(entered[1]) - began < 2.0

        item = await eventually(lambda: store.get(KEYS.checkpoint("start", 3, 1)))
        record = CheckpointRecord.model_validate_json(item.value)
        assert (record.job, record.step, record.directory) == ("start", 3, "/state/3")

        found = await end_job(store, "shared", "start", 1)
        assert not any(alive(rank.pid) for rank in ranks)
        assert all(end.stopped_by_us and not end.is_fault and end.signal == 9 for end in found.exits)
        assert found.started_at and found.stop_began_at and found.stop_ended_at
        assert began < found.started_at < found.stop_began_at < found.stop_ended_at
        assert not list((agent.directory / "state" / "ranks").iterdir())

    with_store(agent._endpoint, test)


def test_newer_generation_replaces_older_which_is_gone_first(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "replace", "stubborn", generation=1)
        old = await stepping(store, "shared", "replace", 1)
        await put_plan(store, "shared", "replace", "steps", generation=2)
        new = await stepping(store, "shared", "replace", 2)
        before = await outcome(store, "shared", "replace", 1, lambda found: found.all_gone)
        after = await outcome(store, "shared", "replace", 2, lambda found: True)
        assert not any(alive(rank.pid) for rank in old)
        assert all(end.stopped_by_us for end in before.exits) and len(before.exits) == 2
        assert before.stop_ended_at is not None and after.started_at is not None
        assert before.stop_ended_at <= after.started_at
        assert before.stop_began_at is not None and before.stop_ended_at - before.stop_began_at < 0.5

        # An older plan, come late, changes nothing.
        await put_plan(store, "shared", "replace", "steps", generation=1)
        await asyncio.sleep(0.3)
        again = await stepping(store, "shared", "replace", 2)
        assert [rank.pid for rank in again] == [rank.pid for rank in new]
        await end_job(store, "shared", "replace", 2)

    with_store(agent._endpoint, test)


def test_generation_without_this_node_ends_its_ranks(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "away", "steps")
        ranks = await stepping(store, "shared", "away")
        await put_plan(store, "shared", "away", "steps", generation=2, ranks=())
        found = await outcome(store, "shared", "away", 1, lambda found: found.all_gone)
        assert all(end.stopped_by_us for end in found.exits)
        assert not any(alive(rank.pid) for rank in ranks)
        await store.delete(KEYS.plan("away"))

    with_store(agent._endpoint, test)


def test_plan_for_another_incarnation_starts_nothing(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "stale", "steps", incarnation="long ago")
        await put_plan(store, "shared", "fresh", "steps")
        await stepping(store, "shared", "fresh")
        beat = await heartbeat(store, "shared")
        assert beat is not None and all(rank.job != "stale" for rank in beat.ranks)
        assert not (agent.directory / "state" / "logs" / "stale").exists()
        await store.delete(KEYS.plan("stale"))
        await end_job(store, "shared", "fresh", 1)

    with_store(agent._endpoint, test)


def test_stop_with_save_is_asked_for_and_ends_well(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        plan = await put_plan(store, "shared", "save", "steps")
        await stepping(store, "shared", "save")
        await store.put(KEYS.plan("save"), plan.model_copy(update={"stop": "save"}).model_dump_json().encode())
        found = await outcome(store, "shared", "save", 1, lambda found: found.all_gone)
        assert all(end.complete and end.exit_code == 0 and not end.stopped_by_us for end in found.exits)
        assert not found.run_complete
        await store.delete(KEYS.plan("save"))

    with_store(agent._endpoint, test)


def test_stop_with_kill_gives_grace_then_kills(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        plan = await put_plan(store, "shared", "kill", "stubborn")
        await stepping(store, "shared", "kill")
        await store.put(KEYS.plan("kill"), plan.model_copy(update={"stop": "kill"}).model_dump_json().encode())
        found = await outcome(store, "shared", "kill", 1, lambda found: found.all_gone)
        assert all(end.stopped_by_us and end.signal == 9 for end in found.exits)
        assert found.stop_began_at is not None and found.stop_ended_at is not None
        assert 1.9 < found.stop_ended_at - found.stop_began_at < 3.0
        await store.delete(KEYS.plan("kill"))

    with_store(agent._endpoint, test)


def test_plan_that_is_stopped_before_it_began_reports_nothing_here(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "never", "steps", stop="save")
        found = await outcome(store, "shared", "never", 1, lambda found: True)
        assert found.all_gone and found.exits == () and found.started_at is None
        await store.delete(KEYS.plan("never"))

    with_store(agent._endpoint, test)


def test_final_job_state_ends_its_ranks_and_lets_no_plan_start(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "final", "steps")
        await stepping(store, "shared", "final")
        now = time.time()
        status = JobStatus(job="final", name="final", state=JobState.CANCELLED, submitted_at=now, changed_at=now)
        await store.put(KEYS.status("final"), status.model_dump_json().encode())
        await outcome(store, "shared", "final", 1, lambda found: found.all_gone)
        await put_plan(store, "shared", "final", "steps", generation=2)
        await asyncio.sleep(0.3)
        assert await store.get(KEYS.outcome("final", 2, "shared")) is None
        await store.delete(KEYS.plan("final"))

    with_store(agent._endpoint, test)


def test_complete_run_is_told(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "complete", "completes")
        found = await outcome(store, "shared", "complete", 1, lambda found: found.all_gone)
        assert found.run_complete
        assert all(end.complete and not end.is_fault and end.cause == "ended well" for end in found.exits)
        await store.delete(KEYS.plan("complete"))

    with_store(agent._endpoint, test)


def test_socket_and_logs_are_private(agent: AgentProcess) -> None:
    sockets = [path for path in _below(agent.directory / "state") if path.is_socket()]
    for path in sockets:
        assert path.stat().st_mode & 0o077 == 0


def _below(root: Path) -> list[Path]:
    return list(root.rglob("*"))
