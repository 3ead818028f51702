"""``everstep checkpoint verify``: every byte against its checksum."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from everstep.cli.checkpoint_program import finding_text, inspect_checkpoints, rate_text
from everstep.cli.options import JsonOption
from everstep.cli.output import ExitCode, answering


def verify_checkpoints(
    place: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT|DIR", help="A checkpoint, or a directory all of whose are checked.")
    ],
    json_output: JsonOption = False,
) -> None:
    """Check every byte; ends with 1 when something is damaged, and names file, tensor and box."""
    with answering(json_output) as out:
        good, answer = inspect_checkpoints(out, "checking", "verify", str(place))
        for one in answer["checkpoints"]:
            out.say(f"{escape(one['directory'])}: {'[green]good[/]' if one['good'] else '[bold red]damaged[/]'}")
            for finding in one["findings"]:
                out.say(f"  {finding_text(finding)}")
        out.say(rate_text(answer))
        out.result(answer)
    if not good:
        raise typer.Exit(ExitCode.FAILED)
