"""Helpers of this room's tests: an agent as a real process, plans for it, and waiting for what it says in etcd."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from engine.planning.config import CheckpointConfig, CorpusConfig, ModelConfig, RunConfig, TrainConfig
from engine.planning.layout import Layout
from engine.planning.messages import Meeting
from everstep.protocol.keys import Keys
from everstep.protocol.messages import Heartbeat, NodeOutcome, NodeRecord, Placement, Plan, RankStatus
from everstep.protocol.store import Store, StoreSettings, StoreUnavailable
from worker.processes import all_processes

T = TypeVar("T")
ROOT = "/test"
KEYS = Keys(ROOT)
TOKEN = "a shared secret for tests"

RUN = RunConfig(
    model=ModelConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        ffn_hidden_size=8,
        vocab_size=16,
        max_sequence_length=8,
    ),
    data=CorpusConfig(path="/nowhere"),
    train=TrainConfig(sequence_length=8, global_batch_size=2, train_steps=10),
    checkpoint=CheckpointConfig(directory="/nowhere"),
)


class AgentProcess:
    """One agent with a state directory of its own."""

    def __init__(self, node: str, endpoint: str, directory: Path) -> None:
        self.node = node
        self._endpoint = endpoint
        self.directory = directory
        self.token_file = directory / "token"
        self.ready_file = directory / "ready.json"
        self.log_file = directory / "agent.log"
        self.process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ready(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.ready_file.read_text())
        return value

    def start(self, *extra: str, state: Path | None = None) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.token_file.write_text(TOKEN)
        self.token_file.chmod(0o600)
        self.ready_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "worker", "--node", self.node, "--etcd", self._endpoint, "--root", ROOT]
        command += ["--devices", "cpu:2", "--state-dir", str(state or self.directory / "state")]
        command += ["--token-file", str(self.token_file), "--ready-file", str(self.ready_file)]
        command += ["--entry", "tests.worker.entries:main", *extra]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait_ready(self, timeout_s: float = 40.0) -> None:
        wait_until(lambda: self.ready_file.exists() or self.process.poll() is not None, timeout_s)
        assert self.process.poll() is None, self.log_file.read_text()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        self.process.wait(timeout=20)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


async def eventually(look: Callable[[], Awaitable[T | None]], timeout_s: float = 10.0) -> T:
    """What ``look`` returns once it is neither None nor False."""
    last: T | None = None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    last = await look()
                except StoreUnavailable:
                    last = None
                if last is not None and last is not False:
                    return last
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"it did not happen within {timeout_s} s") from None


def with_store(endpoint: str, test: Callable[[Store], Awaitable[None]]) -> None:
    """Run an async test with a store."""

    async def run() -> None:
        store = await Store.connect(StoreSettings(endpoints=(endpoint,), root=ROOT))
        try:
            await test(store)
        finally:
            await store.close()

    asyncio.run(run())


async def node_record(store: Store, node: str) -> NodeRecord | None:
    item = await store.get(KEYS.node(node))
    return None if item is None else NodeRecord.model_validate_json(item.value)


async def heartbeat(store: Store, node: str) -> Heartbeat | None:
    item = await store.get(KEYS.beat(node))
    return None if item is None else Heartbeat.model_validate_json(item.value)


async def put_plan(
    store: Store, node: str, job: str, program: str, generation: int = 1, ranks: tuple[int, ...] = (0, 1), **more: Any
) -> Plan:
    """Write a plan that runs ``program`` of entries.py as these ranks on ``node``; ``more`` are fields of the plan."""
    record = await node_record(store, node)
    assert record is not None
    incarnation = more.pop("incarnation", record.incarnation)
    placement = Placement(node=node, incarnation=incarnation, host=record.host, ranks=ranks, devices=ranks)
    plan = Plan.model_validate(
        {
            "job": job,
            "generation": generation,
            "layout": Layout(dp=2),
            "placements": (placement,) if ranks else (),
            "meeting": Meeting(host=record.host, port=record.meeting_port, prefix=f"{job}/g{generation}"),
            "restore": None,
            "history": (),
            "run": RUN,
            "run_directory": f"/nowhere/{program}",
            "reason": "test",
            "created_at": time.time(),
            **more,
        }
    )
    await store.put(KEYS.plan(job), plan.model_dump_json().encode())
    return plan


async def stepping(store: Store, node: str, job: str, generation: int = 1, num_ranks: int = 2) -> list[RankStatus]:
    """Wait until so many ranks of the generation have completed a step, by the heartbeat."""

    async def look() -> list[RankStatus] | None:
        beat = await heartbeat(store, node)
        ranks = [rank for rank in beat.ranks if (rank.job, rank.generation) == (job, generation)] if beat else []
        return ranks if sum(rank.step > 0 for rank in ranks) >= num_ranks else None

    return await eventually(look)


async def outcome(
    store: Store, node: str, job: str, generation: int, enough: Callable[[NodeOutcome], bool], timeout_s: float = 10.0
) -> NodeOutcome:
    """Wait for an outcome that is ``enough``."""

    async def look() -> NodeOutcome | None:
        item = await store.get(KEYS.outcome(job, generation, node))
        found = None if item is None else NodeOutcome.model_validate_json(item.value)
        return found if found is not None and enough(found) else None

    return await eventually(look, timeout_s)


async def end_job(store: Store, node: str, job: str, generation: int) -> NodeOutcome:
    """Delete the plan and wait until nothing is left."""
    await store.delete(KEYS.plan(job))
    return await outcome(store, node, job, generation, lambda found: found.all_gone)


def alive(pid: int) -> bool:
    return any(process.pid == pid and not process.dead for process in all_processes())


def descendants(pid: int) -> set[int]:
    """Pids of all living processes below ``pid``, and itself."""
    below = {pid}
    processes = all_processes()
    while more := {process.pid for process in processes if process.parent in below and not process.dead} - below:
        below |= more
    return below


def sessions_of(pids: list[int]) -> set[int]:
    """Living processes in the sessions that ``pids`` founded."""
    return {process.pid for process in all_processes() if process.session in pids and not process.dead}


def children_named_sleep(pid: int) -> set[int]:
    return {process for process in descendants(pid) if Path(f"/proc/{process}/comm").read_text().strip() == "sleep"}


def assert_all_end(pids: set[int], within_s: float) -> float:
    """Wait until none of ``pids`` lives; returns the seconds that took."""
    began = time.monotonic()
    wait_until(lambda: not any(alive(pid) for pid in pids), within_s)
    return time.monotonic() - began


def kill(pid: int, number: int = signal.SIGKILL) -> float:
    """Send a signal; returns the wall-clock time just before."""
    at = time.time()
    os.kill(pid, number)
    return at
