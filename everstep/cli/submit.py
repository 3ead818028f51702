"""``everstep submit``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from everstep.cli.options import DEFAULT_URL, JsonOption, UrlOption, client_of
from everstep.cli.output import answering
from everstep.cli.spec_file import read_spec
from everstep.cli.watch import follow_to_end


def submit(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="Job spec, YAML or JSON.")],
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job to its end.")] = False,
    url: UrlOption = DEFAULT_URL,
    json_output: JsonOption = False,
) -> None:
    """Submit a job. A spec that cannot be run is refused, field by field."""
    with answering(json_output) as out, client_of(url) as client:
        job = client.submit(read_spec(spec))
        out.say(f"submitted [bold]{escape(job.id)}[/] ({job.state.value})")
        if watch:
            follow_to_end(out, client, job.id)
            return
        out.say(f"follow it: everstep watch {escape(job.id)}")
        out.result({"id": job.id, "state": job.state.value})
