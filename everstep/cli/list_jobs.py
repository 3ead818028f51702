"""``everstep list``."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table

from everstep.cli.options import DEFAULT_URL, JsonOption, UrlOption, client_of
from everstep.cli.output import answering
from everstep.protocol.messages import JobState


def list_jobs(
    state: Annotated[
        list[JobState] | None, typer.Option("--state", help="Only jobs in this state; may be given several times.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    json_output: JsonOption = False,
) -> None:
    """List jobs, newest first."""
    with answering(json_output) as out, client_of(url) as client:
        jobs = [job for job in client.jobs() if not state or job.state in state]
        table = Table("job", "state", "step", "layout", "generation", "restarts", "loss", "submitted")
        for job in jobs:
            table.add_row(
                job.id,
                job.state.value,
                f"{job.step}/{job.train_steps}",
                str(job.layout) if job.layout else "-",
                str(job.generation),
                str(job.restarts),
                f"{job.loss:.4f}" if job.loss is not None else "-",
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.submitted_at)),
            )
        out.console.print(table if jobs else "no jobs")
        out.result({"jobs": [job.model_dump(mode="json") for job in jobs]})
