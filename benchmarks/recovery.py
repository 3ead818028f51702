"""Seconds from a fault to the next completed step, through the whole service on this machine.

The demo's model (3 M parameters, real text) on four agents with two ranks each, etcd and controller as ``everstep up``
starts them, state saved every 10 steps. Faults come from outside at random moments: SIGKILL of one rank, SIGKILL of one
agent, SIGSTOP of a whole node (only its lease tells). A recovery's seconds run from the signal to the first step that
the new generation completes; of a growth, the pause between two steps. ``steps_lost`` is the most completed steps that
one recovery had to repeat.

    python benchmarks/recovery.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import header, last_line
from everstep.cli.demo_corpus import prepare_corpus
from everstep.cli.demo_report import metrics_file, read_metrics
from everstep.cli.demo_spec import demo_spec
from everstep.cli.local_cluster import ClusterSettings, LocalCluster
from everstep.cli.output import Output
from everstep.client import Client, JobDetail

LEASE_S = 2
PATIENCE_S = 60.0


class Bench:
    """A running cluster and one long job on it."""

    def __init__(self, root: Path) -> None:
        prepare_corpus(Output(as_json=False), root)
        settings = ClusterSettings(
            state=root / "state", data_root=root, num_nodes=4, ranks_per_node=2, lease_ttl_s=LEASE_S
        )
        self.cluster = LocalCluster(settings)
        self.random = random.Random(0)

    def start(self) -> None:
        self.cluster.start()
        self.client = Client(self.cluster.url)
        self.job = self.client.submit(demo_spec("bench", 100_000, "bench")).id
        self.settled(1)

    def wait(self, condition: Callable[[JobDetail], bool], what: str) -> JobDetail:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(detail := self.client.job(self.job)):
            if time.monotonic() > deadline or detail.state.final:
                raise SystemExit(f"{what}: not within {PATIENCE_S} s; {detail.state} {detail.reason}")
            time.sleep(0.02)
        return detail

    def settled(self, generation: int) -> JobDetail:
        """The job trains in at least this generation and has a state on disk that it wrote itself."""
        return self.wait(
            lambda job: (
                job.generation >= generation
                and job.plan is not None
                and job.step >= job.plan.start_step + 11
                and job.checkpoint is not None
                and job.checkpoint.generation == job.generation
            ),
            "the job settles",
        )

    def lines(self, job: JobDetail, generation: int) -> Any:
        path = metrics_file(Path(job.run_directory), generation)
        return read_metrics(path) if path.exists() else []

    def recovery(self, before: JobDetail, at: float) -> tuple[float, int, dict[str, float]]:
        """Seconds from ``at`` to the first step of the next generation, steps lost, the split."""
        after = self.wait(
            lambda job: job.generation > before.generation and bool(self.lines(job, job.generation)), "a first step"
        )
        first = self.lines(after, after.generation)[0]
        lost = len([line for line in self.lines(before, before.generation) if line.step >= first.step])
        event = self.told(after.generation)
        return first.at - at, lost, event["split"]

    def told(self, generation: int) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for event in self.client.events(self.job):
                if event.kind == "recovered" and event.data["generation"] == generation:
                    return event.data
            time.sleep(0.05)
        raise SystemExit(f"no event tells of the recovery into generation {generation}")

    def random_moment(self) -> JobDetail:
        self.settled(0)
        time.sleep(self.random.random())
        return self.client.job(self.job)

    def kill_rank(self) -> tuple[float, int, dict[str, float]]:
        before = self.random_moment()
        victim = self.random.choice(before.ranks)
        at = time.time()
        os.kill(victim.pid, signal.SIGKILL)
        return self.recovery(before, at)

    def kill_agent(self) -> tuple[str, tuple[float, int, dict[str, float]]]:
        before = self.random_moment()
        assert before.plan is not None
        victim = self.random.choice(before.plan.placements).node
        return victim, self.recovery(before, self.cluster.kill_node(victim))

    def freeze_node(self) -> tuple[list[int], tuple[float, int, dict[str, float]]]:
        before = self.random_moment()
        assert before.plan is not None
        victim = self.random.choice(before.plan.placements).node
        frozen = [self.cluster.pids[victim]]
        for parent in frozen:
            for task in Path(f"/proc/{parent}/task").glob("*/children"):
                frozen += [int(child) for child in task.read_text().split()]
        at = time.time()
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        return frozen, self.recovery(before, at)

    def grow(self, before: JobDetail) -> tuple[float, int]:
        """The pause of the growth that follows the return of a node."""
        after = self.wait(
            lambda job: job.generation > before.generation and bool(self.lines(job, job.generation)), "growth"
        )
        last, first = self.lines(before, before.generation)[-1], self.lines(after, after.generation)[0]
        return first.at - last.at, max(0, last.step - first.step + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="faults of each kind")
    rounds = parser.parse_args().rounds
    facts = header("torch", "everstep")
    seconds: dict[str, list[float]] = {"rank_killed": [], "agent_killed": [], "node_silent": [], "grow_pause": []}
    splits: dict[str, list[dict[str, float]]] = {kind: [] for kind in seconds}
    lost: dict[str, int] = dict.fromkeys(seconds, 0)

    def note(kind: str, figures: tuple[float, int, dict[str, float]]) -> None:
        seconds[kind].append(figures[0])
        lost[kind] = max(lost[kind], figures[1])
        splits[kind].append(figures[2])
        print(f"{kind}: {figures[0]:.2f} s, {figures[1]} steps again, {json.dumps(figures[2])}", flush=True)

    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        with bench.cluster:
            bench.start()
            for _ in range(rounds):
                note("rank_killed", bench.kill_rank())
                victim, figures = bench.kill_agent()
                note("agent_killed", figures)
                small = bench.settled(0)
                bench.cluster.start_node(victim)
                pause, again = bench.grow(small)
                note("grow_pause", (pause, again, bench.told(small.generation + 1)["split"]))
                frozen, figures = bench.freeze_node()
                note("node_silent", figures)
                small = bench.settled(0)
                for pid in reversed(frozen):
                    os.kill(pid, signal.SIGCONT)
                pause, again = bench.grow(small)
                note("grow_pause", (pause, again, bench.told(small.generation + 1)["split"]))
            job = bench.client.job(bench.job)
            steps = [b.at - a.at for a, b in itertools.pairwise(bench.lines(job, 1))]
            bench.client.cancel(bench.job)
    result: dict[str, Any] = {f"{kind}_median_s": round(statistics.median(taken), 3) for kind, taken in seconds.items()}
    result |= {f"{kind}_max_s": round(max(taken), 3) for kind, taken in seconds.items()}
    result |= {"steps_lost": max(lost.values()), "steps_lost_by_kind": lost, "lease_s": LEASE_S, "rounds": rounds}
    result["split_median_s"] = {
        kind: {phase: round(statistics.median(one.get(phase, 0.0) for one in all_of), 3) for phase in all_of[0]}
        for kind, all_of in splits.items()
    }
    result["step_s"] = round(statistics.median(steps), 3) if steps else None
    last_line({**result, "machine": facts})


if __name__ == "__main__":
    main()
