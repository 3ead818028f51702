"""``everstep demo``: train on real text, lose a node, go on without it, take it back, finish, and prove it.

The node is killed from outside with SIGKILL; only the service's own detection reacts. An undisturbed twin of the job
runs afterwards on the same cluster, and the two are compared.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn

from everstep.cli.demo_corpus import Corpus, prepare_corpus
from everstep.cli.demo_faults import FaultPlan
from everstep.cli.demo_report import LOSS_BOUND, max_relative_loss_difference, recoveries_of, surviving_lines
from everstep.cli.demo_run import FinishedJob, audit_samples, run_job
from everstep.cli.demo_spec import demo_spec
from everstep.cli.demo_summary import print_summary
from everstep.cli.interrupts import one_interrupt
from everstep.cli.local_cluster import ClusterSettings, LocalCluster
from everstep.cli.options import JsonOption
from everstep.cli.output import ExitCode, OperationFailed, Output, answering
from everstep.client import Client
from everstep.protocol.messages import JobState

_NODES, _RANKS_PER_NODE = 4, 2
_LEASE_TTL_S = 2


def demo(
    steps: Annotated[int, typer.Option("--steps", min=60, help="Steps of the job.")] = 150,
    keep: Annotated[
        Path, typer.Option("--keep", help="Everything is written below: the corpus, and a folder for each demo.")
    ] = Path("runs"),
    twin: Annotated[bool, typer.Option("--twin/--no-twin", help="Run an undisturbed twin and compare.")] = True,
    json_output: JsonOption = False,
) -> None:
    """Show the whole thing on this machine: a job on real text loses a node, is reshaped, takes it back, finishes."""
    with answering(json_output) as out, one_interrupt():
        began = time.monotonic()
        root = keep.absolute()
        directory = root / f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        corpus = prepare_corpus(out, root)
        what = "found" if corpus.reused else "made"
        out.say(f"corpus {what}: {corpus.documents:,} documents, {corpus.tokens:,} tokens, {corpus.prefix}.bin")
        directory.mkdir(parents=True)
        disturbed, undisturbed = _run(out, root, directory, steps, twin)
        summary = _summary(disturbed, undisturbed, corpus, directory)
        summary["seconds"] = round(time.monotonic() - began, 1)
        (directory / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        print_summary(out, summary)
        out.result(summary)
        if not summary["passed"]:
            raise typer.Exit(ExitCode.FAILED)


def _run(out: Output, root: Path, directory: Path, steps: int, twin: bool) -> tuple[FinishedJob, FinishedJob | None]:
    """Both jobs on a cluster that lives no longer than they."""
    settings = ClusterSettings(
        state=directory / "cluster",
        data_root=root,
        num_nodes=_NODES,
        ranks_per_node=_RANKS_PER_NODE,
        lease_ttl_s=_LEASE_TTL_S,
    )
    checkpoints = directory.relative_to(root).as_posix()
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    plain = not out.console.is_terminal
    with Progress(*columns, console=out.console, transient=True, disable=plain) as progress:
        task = progress.add_task("starting etcd")
        up: list[str] = []

        def on_progress(name: str) -> None:
            up.append(name)
            progress.update(task, description=f"up: {', '.join(up)}")

        cluster = LocalCluster(settings, on_progress)
        try:
            cluster.start()
        except BaseException:
            cluster.stop()
            raise
    with cluster, Client(cluster.url) as client:
        pids = "  ".join(f"{name} {pid}" for name, pid in cluster.pids.items())
        out.say(f"cluster up at {cluster.url}, pids: {pids}")
        disturbed = run_job(
            out,
            cluster,
            client,
            demo_spec("demo", steps, checkpoints),
            FaultPlan.for_steps(steps),
            lambda job: out.say(f"submitted [bold]{job.id}[/] over REST"),
        )
        if disturbed.job.state is not JobState.SUCCEEDED:
            raise OperationFailed(
                f"{disturbed.job.id} ended as {disturbed.job.state}: {disturbed.job.reason}; logs: {settings.state}"
            )
        undisturbed = None
        if twin:
            out.say("now the undisturbed twin, the same spec on the same cluster")
            undisturbed = run_job(out, cluster, client, demo_spec("demo-twin", steps, checkpoints))
    shutil.rmtree(settings.state / "etcd")  # the largest part, and of no use without its cluster
    return disturbed, undisturbed


def _summary(
    disturbed: FinishedJob, undisturbed: FinishedJob | None, corpus: Corpus, directory: Path
) -> dict[str, Any]:
    """The demo's claims as one JSON object, from what the runs wrote."""
    recovered = [event.data for event in disturbed.events if event.kind == "recovered"]
    if disturbed.kill is None:
        raise OperationFailed("the job ended before its node could be killed; give more --steps")
    recoveries = recoveries_of(recovered, disturbed.lines_of, disturbed.kill)
    trail = surviving_lines(disturbed.history, disturbed.lines_of)
    finished = len(trail) == disturbed.job.train_steps and disturbed.job.state is JobState.SUCCEEDED
    audits = [audit_samples(run) for run in (disturbed, undisturbed) if run is not None]
    difference = None
    if undisturbed is not None:
        twin_trail = surviving_lines(undisturbed.history, undisturbed.lines_of)
        finished = finished and len(twin_trail) == len(trail)
        difference = max_relative_loss_difference(trail, twin_trail) if finished else None
    samples_each_once = all(audit["samples_each_once"] for audit in audits)
    equal = undisturbed is None or (difference is not None and difference <= LOSS_BOUND)
    return {
        "passed": finished and samples_each_once and equal and [r.kind for r in recoveries] == ["node_lost", "grow"],
        "finished": finished,
        "recoveries": [recovery.as_json() for recovery in recoveries],
        "samples_each_once": samples_each_once,
        "max_relative_loss_difference": difference,
        "steps": len(trail),
        "steps_done_again": sum(recovery.steps_lost for recovery in recoveries),
        "loss_first": trail[0].loss,
        "loss_last": trail[-1].loss,
        "layouts": [
            {"generation": g.generation, "layout": str(g.layout), "start_step": g.start_step}
            for g in disturbed.generations
        ],
        "samples": audits[0]["samples"],
        "problems": [problem for audit in audits for problem in audit["problems"]],
        "job_seconds": round(disturbed.seconds, 1),
        "twin_seconds": round(undisturbed.seconds, 1) if undisturbed is not None else None,
        "corpus": {"documents": corpus.documents, "tokens": corpus.tokens, "prefix": str(corpus.prefix)},
        "paths": {
            "directory": str(directory),
            "metrics": str(disturbed.run_directory / "metrics"),
            "samples": str(disturbed.run_directory / "samples"),
            "twin_metrics": str(undisturbed.run_directory / "metrics") if undisturbed is not None else None,
            "logs": str(directory / "cluster"),
        },
    }
