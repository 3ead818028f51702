"""``everstep checkpoint prune``: delete old checkpoints, never the last good one."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from everstep.cli.checkpoint_program import DirectoryArgument, finding_text, inspect_checkpoints, rate_text
from everstep.cli.options import JsonOption
from everstep.cli.output import ExitCode, answering


def prune_checkpoints(
    directory: DirectoryArgument,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Good checkpoints that stay.")],
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it nothing is, only told.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Tell, and with --yes delete, what is older than the newest good checkpoints; those are checked first."""
    with answering(json_output) as out:
        arguments = ["prune", str(directory), "--keep", str(keep), *(["--yes"] if yes else [])]
        good, answer = inspect_checkpoints(out, "checking what stays", *arguments)
        for entry in answer["kept"]:
            out.say(f"[green]stays[/]    {escape(entry['directory'])}")
        for entry in answer["damaged"]:
            out.say(f"[red]damaged[/]  {escape(entry['directory'])}; it stays and does not count")
            for finding in entry["findings"]:
                out.say(f"         {finding_text(finding)}")
        deleted = set(answer["deleted"])
        for entry in answer["expendable"]:
            gone = "deleted" if entry["directory"] in deleted else "left" if yes else "can go"
            out.say(f"[yellow]{gone:8}[/] {escape(entry['directory'])}")
        if answer["note"]:
            out.say(escape(answer["note"]))
        if not yes and answer["expendable"]:
            out.say("nothing was deleted; --yes deletes")
        out.say(rate_text(answer))
        out.result(answer)
    if not good:
        raise typer.Exit(ExitCode.FAILED)
