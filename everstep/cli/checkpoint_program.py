"""Running the engine's program that looks at checkpoints, with a progress bar over the bytes that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from everstep.cli.engine_program import run_program
from everstep.cli.output import BadInput, OperationFailed, Output

_MODULE = "engine.checkpoint.inspect"
_BAD_INPUT = 2  # its exit codes are ours: 0 all is well, 1 found something or failed, 2 the input cannot be right

CheckpointArgument = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's own directory.")]
DirectoryArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="A job's run directory, or the directory of its checkpoints.")
]


def inspect_checkpoints(output: Output, doing: str, *arguments: str) -> tuple[bool, dict[str, Any]]:
    """Run the program; returns whether all is well, and its answer.

    ``doing`` stands before the progress bar. Raises BadInput when the arguments cannot be right, OperationFailed when
    there is no answer.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=output.console, transient=True)
    shown = output.console.is_interactive
    task = progress.add_task(doing, total=None)

    def on_line(line: dict[str, Any]) -> None:
        if shown and line.get("kind") == "progress":
            progress.start()
            progress.update(task, completed=line["bytes_done"], total=line["bytes_total"])

    try:
        code, last, errors = run_program(_MODULE, arguments, on_line)
    finally:
        if shown:
            progress.stop()
    if last is not None and last.get("kind") == "result":
        return code == 0, {name: value for name, value in last.items() if name != "kind"}
    if last is not None and last.get("kind") == "error":
        if code == _BAD_INPUT:
            raise BadInput(last["error"])
        raise OperationFailed(last["error"])
    if code == _BAD_INPUT:
        raise BadInput(errors.splitlines()[-1] if errors else "wrong usage")
    raise OperationFailed(errors or f"the program ended with exit code {code}")


def layout_text(layout: Mapping[str, Any] | None) -> str:
    """A layout as it is written everywhere, ``-`` when it is not known."""
    return f"TP{layout['tp']}·PP{layout['pp']}·DP{layout['dp']}" if layout else "-"


def rate_text(answer: Mapping[str, Any]) -> str:
    """How much was read in what time."""
    num_bytes, seconds = answer["bytes_read"], answer["seconds"]
    return f"{decimal(num_bytes)} read in {seconds:.1f} s" + (
        f", {num_bytes / seconds / 1e9:.2f} GB/s" if seconds >= 0.1 else ""
    )


def finding_text(finding: Mapping[str, Any]) -> str:
    """One thing that is wrong, on a line; rich markup is escaped."""
    return escape(f"{finding['file']}: {finding['reason']}")
