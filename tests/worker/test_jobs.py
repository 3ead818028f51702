"""Which plans become ranks, and that a node always says when nothing of a plan is here. No process is started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

from engine.planning.layout import Layout
from engine.planning.messages import Meeting, Message
from everstep.protocol.messages import Device, JobState, JobStatus, NodeOutcome, Placement, Plan
from everstep.protocol.store import Change, KeyValue, Snapshot
from tests.coroutines import in_event_loop
from tests.worker.cluster import KEYS, RUN
from worker.generation import Site
from worker.jobs import Jobs
from worker.rank_lines import RankLines
from worker.state_dir import StateDir
from worker.warm_client import WarmParentHandle


def plan(generation: int = 1, *, node: str = "here") -> Plan:
    placement = Placement(node=node, incarnation="now", host="127.0.0.1", ranks=(0,), devices=(0,))
    return Plan(
        job="j",
        generation=generation,
        layout=Layout(),
        placements=(placement,),
        meeting=Meeting(host="127.0.0.1", port=1, prefix=f"j/g{generation}"),
        restore=None,
        history=(),
        run=RUN,
        run_directory="/nowhere",
        reason="",
        created_at=0.0,
    )


FAILED = JobStatus(job="j", name="j", state=JobState.FAILED, submitted_at=0.0, changed_at=0.0)


def item(key: str, message: Message) -> KeyValue:
    return KeyValue(key, message.model_dump_json().encode(), 1, 1)


def change(key: str, message: Message) -> Change:
    return Change(1, key, item(key, message))


async def told(tmp_path: Path, *told: Snapshot | Change) -> list[NodeOutcome]:
    """What a node whose warm parent is not up yet publishes when its watch tells it this."""
    outcomes: list[NodeOutcome] = []
    state = StateDir(tmp_path)
    site = Site(
        node="here",
        incarnation="now",
        host="127.0.0.1",
        devices=(Device(kind="cpu", index=0, memory_bytes=1, peak_flops=1.0),),
        state=state,
        lines=RankLines(
            state.socket,
            beat=lambda: None,
            committed=lambda record: None,
            save_failed=lambda job, failed: None,
            now=time.time,
        ),
        silence_limit_s=3.0,
        num_threads=1,
        publish=outcomes.append,
        beat=lambda: None,
    )

    async def no_warm_parent() -> WarmParentHandle:
        await asyncio.Event().wait()
        raise AssertionError

    async def changes() -> AsyncIterator[Snapshot | Change]:
        for one in told:
            yield one

    async with asyncio.TaskGroup() as tasks:
        jobs = Jobs(KEYS, site, no_warm_parent, tasks)
        await jobs.follow(changes())
        await asyncio.sleep(0.02)
        await jobs.shut_down()
    return outcomes


@in_event_loop
async def test_a_job_that_failed_before_it_began_here_leaves_the_devices(tmp_path: Path) -> None:
    """Another node was quicker, and its rank found the user's error."""
    stopped = plan().model_copy(update={"stop": "kill"})
    [outcome] = await told(
        tmp_path,
        Snapshot(0, ()),
        change(KEYS.plan("j"), plan()),
        change(KEYS.status("j"), FAILED),
        change(KEYS.plan("j"), stopped),
    )
    assert (outcome.generation, outcome.all_gone, outcome.exits) == (1, True, ())


@in_event_loop
async def test_a_job_that_came_and_failed_while_etcd_was_out_of_sight(tmp_path: Path) -> None:
    listed = (item(KEYS.plan("j"), plan()), item(KEYS.status("j"), FAILED))
    [outcome] = await told(tmp_path, Snapshot(9, listed))
    assert outcome.all_gone
    known = item(KEYS.outcome("j", 1, "here"), outcome)
    assert await told(tmp_path, Snapshot(9, (*listed, known))) == []
    elsewhere = (item(KEYS.plan("j"), plan(node="there")), listed[1])
    assert await told(tmp_path, Snapshot(9, elsewhere)) == []
