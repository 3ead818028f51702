"""Running the demo's jobs on a local cluster: one that loses a node and takes it back, one that nothing disturbs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.planning.messages import GenerationStart
from everstep.cli.demo_faults import FaultPlan, FaultScript
from everstep.cli.demo_report import Kill, StepLine, read_run_metrics
from everstep.cli.engine_program import run_program
from everstep.cli.follow import Follower
from everstep.cli.job_display import JobDisplay
from everstep.cli.local_cluster import LocalCluster
from everstep.cli.output import OperationFailed, Output
from everstep.client import Client, Generation, JobDetail
from everstep.protocol.messages import Event, JobState

_POLL_S = 0.35
_STUCK_S = 120.0
"""A demo whose job shows no progress for so long has failed."""


@dataclass(frozen=True)
class FinishedJob:
    """A job that has ended, and what is known of it. ``seconds`` from submission to its end."""

    job: JobDetail
    events: tuple[Event, ...]
    generations: tuple[Generation, ...]
    lines_of: dict[int, list[StepLine]]
    seconds: float
    kill: Kill | None = None

    @property
    def history(self) -> list[GenerationStart]:
        """The generations and the step at which each began."""
        return [GenerationStart(generation=g.generation, start_step=g.start_step) for g in self.generations]

    @property
    def run_directory(self) -> Path:
        """Where metrics, samples and checkpoints are."""
        return Path(self.job.run_directory)


def run_job(
    out: Output,
    cluster: LocalCluster,
    client: Client,
    spec: dict[str, Any],
    faults: FaultPlan | None = None,
    on_submitted: Callable[[JobDetail], None] = lambda job: None,
) -> FinishedJob:
    """Submit ``spec`` and follow it to its end, with the faults of ``faults`` on the way.

    Raises OperationFailed when the job makes no progress or the cluster falls apart.
    """
    began = time.monotonic()
    job = client.submit(spec)
    on_submitted(job)
    follower = Follower(client, job.id)
    script = FaultScript(faults) if faults is not None else None
    kill: Kill | None = None
    victim = ""
    progress, progress_at = (0, 0, JobState.QUEUED), time.monotonic()
    with JobDisplay(out) as display:
        while True:
            cluster.check()
            tick = follower.poll()
            display.show(tick)
            if tick is None:
                continue
            job = tick.job
            if job.state.final:
                break
            if (seen := (job.generation, job.step, job.state)) != progress:
                progress, progress_at = seen, time.monotonic()
            if time.monotonic() - progress_at > _STUCK_S:
                raise OperationFailed(f"{job.id} shows no progress for {_STUCK_S:.0f} s: {job.state} {job.reason}")
            match script.move(job) if script is not None else None:
                case "kill":
                    assert job.plan is not None
                    victim = job.plan.placements[len(job.plan.placements) // 2].node
                    kill = Kill(at=cluster.kill_node(victim), generation=job.generation)
                    display.note(f"[bold red]SIGKILL[/] to the agent of [bold]{victim}[/] at step {job.step}")
                case "restart":
                    cluster.start_node(victim)
                    display.note(f"[bold green]starting[/] the agent of [bold]{victim}[/] again at step {job.step}")
            time.sleep(_POLL_S)
    generations = client.generations(job.id)
    history = [GenerationStart(generation=g.generation, start_step=g.start_step) for g in generations]
    return FinishedJob(
        job=job,
        events=client.events(job.id),
        generations=generations,
        lines_of=read_run_metrics(Path(job.run_directory), history),
        seconds=time.monotonic() - began,
        kill=kill,
    )


def audit_samples(finished: FinishedJob) -> dict[str, Any]:
    """Whether the job consumed each sample exactly once: computed by the engine's audit program from its logs.

    Raises OperationFailed when the audit cannot be made.
    """
    arguments = ["--run-directory", str(finished.run_directory)]
    arguments += ["--history", json.dumps([start.model_dump() for start in finished.history])]
    arguments += ["--run", finished.job.spec.run_config().model_dump_json()]
    code, result, errors = run_program("engine.data.audit", arguments)
    if result is None or code not in (0, 1):
        raise OperationFailed(f"the audit of the samples ended with code {code}: {errors}")
    return result
