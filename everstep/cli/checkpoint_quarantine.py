"""``everstep checkpoint quarantine``: set a bad checkpoint aside, or take it back."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from everstep.cli.checkpoint_program import CheckpointArgument, inspect_checkpoints
from everstep.cli.options import JsonOption
from everstep.cli.output import BadInput, answering


def quarantine_checkpoint(
    checkpoint: CheckpointArgument,
    reason: Annotated[str | None, typer.Option("--reason", help="Why; kept with the checkpoint.")] = None,
    release: Annotated[bool, typer.Option("--release", help="Take back one that was set aside.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Rename a checkpoint so that nothing restores from it and nothing deletes it; --release undoes that."""
    with answering(json_output) as out:
        if release:
            if reason is not None:
                raise BadInput("--reason has no meaning with --release")
            arguments = ["release", str(checkpoint)]
        else:
            if not reason:
                raise BadInput("--reason is missing: say why, for whoever finds it")
            arguments = ["quarantine", str(checkpoint), f"--reason={reason}"]
        _, answer = inspect_checkpoints(out, "renaming", *arguments)
        out.say(f"{escape(answer['was'])} is now {escape(answer['directory'])}")
        out.result(answer)
