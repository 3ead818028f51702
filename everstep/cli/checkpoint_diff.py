"""``everstep checkpoint diff``: two checkpoints of any layouts, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from everstep.cli.checkpoint_program import inspect_checkpoints, layout_text, rate_text
from everstep.cli.options import JsonOption
from everstep.cli.output import ExitCode, answering

_SHOWN = 10


def diff_checkpoints(
    first: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", min=0.0, help="Largest absolute difference that counts as the same; none: no bit."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Compare two checkpoints, whatever layouts wrote them; ends with 1 when they differ."""
    with answering(json_output) as out:
        extra = [] if tolerance is None else [f"--tolerance={tolerance!r}"]
        same, answer = inspect_checkpoints(out, "comparing", "diff", *extra, str(first), str(second))
        for side in ("first", "second"):
            out.say(_origin(side, answer[side]))
        for problem in answer["problems"]:
            out.say(f"[red]{escape(problem)}[/]")
        if answer["kinds"]:
            out.console.print(_kinds(answer["kinds"]))
        if answer["different"]:
            out.console.print(_worst(answer["different"]))
        if answer["bit_equal"]:
            out.say("[green]all tensors are equal, bit by bit[/]")
        elif same:
            out.say(f"[green]all tensors are equal within {tolerance}[/]")
        else:
            out.say("[bold red]the checkpoints differ[/]")
        out.say(rate_text(answer))
        out.result(answer)
    if not same:
        raise typer.Exit(ExitCode.FAILED)


def _origin(side: str, one: dict[str, Any]) -> str:
    where = f"{side}: {one['directory']}, step {one['step']:,}, generation {one['generation']}"
    return escape(f"{where}, {layout_text(one['layout'])}")


def _kinds(kinds: dict[str, dict[str, Any]]) -> Table:
    table = Table("kind", "tensors", "bit-equal", "largest difference", "not finite")
    for kind, one in kinds.items():
        gap = f"{one['max_abs']:.3g}" if one["bit_equal"] < one["tensors"] else "-"
        table.add_row(kind, f"{one['tensors']:,}", f"{one['bit_equal']:,}", gap, f"{one['num_incomparable']:,}")
    return table


def _worst(different: list[dict[str, Any]]) -> Table:
    table = Table("tensor", "elements that differ", "largest difference", "not finite")
    for one in different[:_SHOWN]:
        table.add_row(
            Text(one["tensor"]),
            f"{one['num_different']:,} of {one['numel']:,}",
            f"{one['max_abs']:.3g}",
            f"{one['num_incomparable']:,}",
        )
    if len(different) > _SHOWN:
        table.caption = f"and {len(different) - _SHOWN:,} more; --json lists them"
    return table
