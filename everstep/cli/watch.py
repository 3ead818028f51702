"""``everstep watch``: a job live, until it ends."""

from __future__ import annotations

import time

import typer

from everstep.cli.follow import Follower
from everstep.cli.job_display import JobDisplay
from everstep.cli.options import DEFAULT_URL, JobArgument, JsonOption, UrlOption, client_of
from everstep.cli.output import ExitCode, Output, answering
from everstep.client import Client
from everstep.protocol.messages import JobState

_INTERVAL_S = 0.5


def follow_to_end(out: Output, client: Client, job: str) -> None:
    """Show a job until it has ended; exits with 1 unless it succeeded."""
    follower = Follower(client, job)
    with JobDisplay(out) as display:
        while True:
            tick = follower.poll()
            display.show(tick)
            if tick is not None and tick.job.state.final:
                break
            time.sleep(_INTERVAL_S)
    ended = tick.job
    out.result(ended.model_dump(mode="json", exclude={"spec", "ranks"}))
    if ended.state is not JobState.SUCCEEDED:
        raise typer.Exit(ExitCode.FAILED)


def watch(job: JobArgument, url: UrlOption = DEFAULT_URL, json_output: JsonOption = False) -> None:
    """Follow a job live: events, progress, loss, layout, MFU. Ctrl-C ends the watching, not the job."""
    with answering(json_output) as out, client_of(url) as client:
        follow_to_end(out, client, job)
