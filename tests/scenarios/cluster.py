"""What scenarios share: a local cluster, a small job on real text, waiting for conditions, and proofs of exactness."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from engine.planning.messages import GenerationStart
from everstep.cli.demo_report import StepLine, max_relative_loss_difference, metrics_file, read_metrics, surviving_lines
from everstep.cli.local_cluster import ClusterSettings, LocalCluster
from everstep.client import Client, JobDetail
from everstep.protocol.messages import Event, JobState

LEASE_S = 2
DEADLINE_S = 30.0
T = TypeVar("T")


def wait_for(condition: Callable[[], T | None], what: str, timeout_s: float = DEADLINE_S) -> T:
    """The first value of ``condition`` that is neither None nor False."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value is not None and value is not False:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


class Cluster:
    """Three nodes with two ranks each, a client, and the corpus below the data root."""

    def __init__(self, directory: Path, corpus: str, *, num_nodes: int = 3, ranks_per_node: int = 2) -> None:
        self.data = directory / "data"
        self.data.mkdir(parents=True)
        for ending in (".bin", ".idx"):
            shutil.copy(corpus + ending, self.data / f"tokens{ending}")
        self.local = LocalCluster(
            ClusterSettings(
                state=directory / "state",
                data_root=self.data,
                num_nodes=num_nodes,
                ranks_per_node=ranks_per_node,
                lease_ttl_s=LEASE_S,
                settle_s=1.0,
            )
        )

    def __enter__(self) -> Self:
        self.local.start()
        self.client = Client(self.local.url)
        self.all_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.local.stop()

    def all_ready(self) -> None:
        """Wait until every node is registered; start those that have been killed."""
        for name in self.local.ended_nodes():
            self.local.start_node(name)
        names = set(self.local.node_names)
        wait_for(
            lambda: {node.node for node in self.client.nodes() if node.state == "ready"} == names, "nodes are ready"
        )

    def spec(self, name: str, **train: Any) -> dict[str, Any]:
        """A small job: GQA, SwiGLU, vocabulary 1003; saves every 10 steps."""
        return {
            "name": name,
            "model": {
                "num_layers": 4,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "ffn_hidden_size": 128,
                "vocab_size": 1003,
                "max_sequence_length": 64,
            },
            "data": {"path": "tokens"},
            "train": {
                "sequence_length": 64,
                "global_batch_size": 8,
                "train_steps": 120,
                "lr": 5e-4,
                "warmup_steps": 10,
                "log_samples": True,
                **train,
            },
            "checkpoint": {"directory": "jobs", "save_interval": 10},
        }

    def submit(self, spec: dict[str, Any]) -> str:
        """Submit; returns the job's id."""
        return self.client.submit(spec).id

    def at_step(self, job: str, step: int, generation: int = 0) -> JobDetail:
        """Wait until the job has completed ``step`` steps (in ``generation`` or later)."""

        def there() -> JobDetail | None:
            detail = self.client.job(job)
            assert detail.state not in (JobState.FAILED, JobState.CANCELLED), detail.reason
            good = detail.step >= step and detail.generation >= generation and detail.ranks
            return detail if good else None

        return wait_for(there, f"{job} reaches step {step} in generation {generation}")

    def ended(self, job: str, timeout_s: float = 90.0) -> JobDetail:
        """Wait until the job has ended."""

        def final() -> JobDetail | None:
            detail = self.client.job(job)
            return detail if detail.state.final else None

        return wait_for(final, f"{job} ends", timeout_s)

    def event(self, job: str, kind: str, number: int = 1) -> Event:
        """Wait for the n-th event of a kind."""

        def found() -> Event | None:
            events = [event for event in self.client.events(job) if event.kind == kind]
            return events[number - 1] if len(events) >= number else None

        return wait_for(found, f"event {kind} number {number} of {job}")

    def history(self, job: str) -> list[GenerationStart]:
        """The generations and where each began."""
        return [GenerationStart(generation=g.generation, start_step=g.start_step) for g in self.client.generations(job)]

    def first_step_at(self, job: JobDetail, generation: int) -> float:
        """Wall clock of the first step that ``generation`` completed."""
        path = metrics_file(Path(job.run_directory), generation)
        return wait_for(lambda: path.exists() and (read_metrics(path) or [None])[0], f"steps of {generation}").at

    def trail_lines(self, job: JobDetail, generation: int) -> list[StepLine]:
        """The lines that one generation has written so far."""
        return read_metrics(metrics_file(Path(job.run_directory), generation))

    def trail(self, job: str) -> Any:
        """The surviving loss trail."""
        directory = Path(self.client.job(job).run_directory)
        history = self.history(job)
        lines = {
            g.generation: read_metrics(metrics_file(directory, g.generation))
            for g in history
            if metrics_file(directory, g.generation).exists()
        }
        return surviving_lines(history, lines)

    def prove_exact(self, job: str, twin: str) -> None:
        """Every sample exactly once in the surviving history, and the losses of the twin that nothing disturbed."""
        detail = self.client.job(job)
        history = json.dumps([start.model_dump() for start in self.history(job)])
        command = [sys.executable, "-m", "engine.data.audit", "--run-directory", detail.run_directory]
        command += ["--history", history, "--run", detail.spec.run_config().model_dump_json()]
        audit = json.loads(subprocess.run(command, capture_output=True, check=False).stdout.splitlines()[-1])
        assert audit["samples_each_once"], audit
        trail, expected = self.trail(job), self.trail(twin)
        assert [line.step for line in trail] == list(range(1, detail.train_steps + 1))
        assert max_relative_loss_difference(trail, expected) < 1e-4


def pids_of(detail: JobDetail) -> dict[int, int]:
    """Rank to pid."""
    return {status.rank: status.pid for status in detail.ranks}


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def tree(pid: int) -> list[int]:
    """A process and all its descendants, parents first."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def kill(pid: int, how: signal.Signals = signal.SIGKILL) -> float:
    """Send a signal; returns the wall clock of it."""
    at = time.time()
    os.kill(pid, how)
    return at
