"""How a rank ended is told apart, with evidence and nothing guessed."""

from __future__ import annotations

import signal

from everstep.protocol.messages import NodeOutcome, RankExit
from everstep.protocol.store import Store
from tests.worker.cluster import (
    AgentProcess,
    alive,
    children_named_sleep,
    descendants,
    end_job,
    eventually,
    kill,
    outcome,
    put_plan,
    sessions_of,
    stepping,
    with_store,
)


def _first_fault(agent: AgentProcess, job: str, program: str) -> RankExit:
    """Run ``program``; its rank 1 goes wrong, rank 0 goes on until it is stopped. Returns the end of rank 1."""
    ends: list[RankExit] = []

    async def test(store: Store) -> None:
        await put_plan(store, "shared", job, program)
        found = await outcome(store, "shared", job, 1, lambda found: bool(found.exits))
        assert [end.rank for end in found.exits] == [1]
        last = await end_job(store, "shared", job, 1)
        assert [(end.rank, end.stopped_by_us) for end in last.exits] == [(1, False), (0, True)]
        assert [end.is_fault for end in last.exits] == [True, False]
        assert last.exits[1].cause == "stopped by its agent"
        ends.append(last.exits[0])

    with_store(agent._endpoint, test)
    return ends[0]


def test_exception_record(agent: AgentProcess) -> None:
    end = _first_fault(agent, "raises", "raises")
    assert end.failure is not None
    assert (end.failure.error, end.failure.category, end.failure.step, end.step) == ("ValueError", "user", 7, 7)
    assert (end.exit_code, end.signal) == (10, None)
    assert end.cause == "ValueError: no such file"
    assert "about to fail" in end.log_tail


def test_exception_out_of_the_entry(agent: AgentProcess) -> None:
    end = _first_fault(agent, "escapes", "escapes")
    assert (end.exit_code, end.signal, end.failure) == (1, None, None)
    assert "RuntimeError: out of the entry" in end.log_tail


def test_exit_code(agent: AgentProcess) -> None:
    end = _first_fault(agent, "exits", "exits")
    assert (end.exit_code, end.signal, end.failure) == (37, None, None)
    assert end.cause == "ended with exit code 37 and left no record"


def test_signal(agent: AgentProcess) -> None:
    end = _first_fault(agent, "segfaults", "segfaults")
    assert (end.exit_code, end.signal) == (None, signal.SIGSEGV)
    assert end.cause == "killed by signal 11 (Segmentation fault), cause unknown"


def test_sigkill_from_outside_is_no_guess(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "killed", "steps")
        ranks = await stepping(store, "shared", "killed")
        victim = next(rank for rank in ranks if rank.rank == 1)
        at = kill(victim.pid)
        found = await outcome(store, "shared", "killed", 1, lambda found: bool(found.exits))
        (end,) = found.exits
        assert (end.rank, end.pid, end.signal, end.exit_code) == (1, victim.pid, 9, None)
        assert end.is_fault and end.step >= victim.step > 0
        assert end.cause == "killed by signal 9 (Killed), cause unknown"
        assert 0 <= end.at - at < 0.5
        await end_job(store, "shared", "killed", 1)

    with_store(agent._endpoint, test)


def test_two_deaths_are_both_told(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "both", "steps")
        ranks = await stepping(store, "shared", "both")
        for rank in ranks:
            kill(rank.pid)
        found = await outcome(store, "shared", "both", 1, lambda found: found.all_gone)
        assert {end.rank for end in found.exits} == {0, 1}
        assert all(end.is_fault and end.signal == 9 for end in found.exits)
        await end_job(store, "shared", "both", 1)

    with_store(agent._endpoint, test)


def test_stopped_rank_can_be_ended(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "frozen", "steps")
        ranks = await stepping(store, "shared", "frozen")
        kill(ranks[0].pid, signal.SIGSTOP)
        found = await end_job(store, "shared", "frozen", 1)
        assert all(end.stopped_by_us and end.signal == 9 for end in found.exits)

    with_store(agent._endpoint, test)


def test_what_ranks_started_goes_with_them(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "family", "family")
        ranks = await stepping(store, "shared", "family")
        pids = [rank.pid for rank in ranks]

        async def born() -> bool:
            return len(children_named_sleep(agent.pid)) == 4

        await eventually(born)
        everybody = set().union(*(descendants(pid) for pid in pids))
        assert len(everybody) == 8
        kill(pids[0])

        async def first_family_gone() -> NodeOutcome | None:
            return await outcome(store, "shared", "family", 1, lambda found: bool(found.exits))

        await eventually(first_family_gone)
        await end_job(store, "shared", "family", 1)
        assert not any(alive(pid) for pid in everybody)
        assert not sessions_of(pids)

    with_store(agent._endpoint, test)
