"""Looking at the shared disk: what is complete there, what the index names in vain, and a disk that does not answer."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from controller import disk
from controller.view import OnDisk
from engine.planning.layout import Layout
from everstep.protocol.messages import RankExit
from everstep.protocol.store import StoreSettings
from tests.controller.running import Running, running
from tests.controller.specs import job, nodes_of, plan
from tests.coroutines import in_event_loop, until


def save(directory: Path, name: str, *, complete: bool = True) -> str:
    (directory / name).mkdir(parents=True)
    if complete:
        (directory / name / "manifest.json").write_text("{}")
    return str(directory / name)


def test_only_complete_checkpoints_are_found(tmp_path: Path) -> None:
    save(tmp_path, "step-000000020.g2")
    save(tmp_path, "step-000000010.g1")
    unfinished = save(tmp_path, "step-000000030.g2", complete=False)
    save(tmp_path, "something-else")
    elsewhere, pruned = "/elsewhere/step-000000005.g1", str(tmp_path / "step-000000005.g1")
    seen = disk.look(tmp_path, [str(tmp_path / "step-000000010.g1"), unfinished, pruned, elsewhere])
    assert [(point.step, point.generation) for point in seen.found] == [(10, 1), (20, 2)]
    assert seen.gone == {unfinished, pruned}


def with_run_directory(directory: Path) -> Any:
    return job(of_plan=plan(Layout(), nodes_of("a")).model_copy(update={"run_directory": str(directory)}))


@in_event_loop
async def test_what_cannot_be_listed_says_nothing(tmp_path: Path) -> None:
    reader = disk.DiskReader()
    assert await reader.look(with_run_directory(tmp_path / "nowhere")) == OnDisk()
    (tmp_path / "checkpoints").write_text("a file")
    assert await reader.look(with_run_directory(tmp_path)) == OnDisk()


@in_event_loop
async def test_a_disk_that_hangs_costs_little_time_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    release, calls = threading.Event(), []

    def hang(*arguments: Any) -> OnDisk:
        calls.append(arguments)
        release.wait(10.0)
        return OnDisk()

    monkeypatch.setattr(disk, "look", hang)
    reader, one = disk.DiskReader(timeout_s=0.1), with_run_directory(Path("/nowhere"))
    began = time.monotonic()
    for _ in range(3):
        assert await reader.look(one) == OnDisk()
    assert time.monotonic() - began < 0.5 and len(calls) == 1
    release.set()
    await until(lambda: not reader._pending)
    await reader.look(one)
    assert len(calls) == 2


@in_event_loop
async def test_a_checkpoint_that_was_never_indexed_is_restored(store_settings: StoreSettings, tmp_path: Path) -> None:
    """The agent that had to index it died; retention has deleted the one that the index names."""
    async with running(store_settings, tmp_path) as service:
        await service.add_agents("a b")
        name = await service.submit()
        await service.reach(name, "RUNNING", 1)
        agent = service.agents["a"]
        await until(lambda: agent.plan)
        await agent.save(10)
        await until(lambda: service.controller.board.view.jobs[name].checkpoints)
        assert agent.plan is not None
        newest = save(Path(agent.plan.run_directory) / "checkpoints", "step-000000040.g1")
        await fail(service)
        detail = await service.reach(name, "RUNNING", 2)
        assert (detail["plan"]["restore"]["step"], detail["plan"]["restore"]["directory"]) == (40, newest)


async def fail(service: Running) -> None:
    await service.agents["a"].end_ranks(RankExit(rank=0, pid=1, signal=9, at=time.time(), step=1), all_gone=False)
