"""``everstep checkpoint show``: what a checkpoint's manifest says."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from everstep.cli.checkpoint_program import CheckpointArgument, inspect_checkpoints, layout_text
from everstep.cli.options import JsonOption
from everstep.cli.output import answering


def show_checkpoint(
    checkpoint: CheckpointArgument,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensors too.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Show what one checkpoint holds, by its manifest; `verify` reads the data too."""
    with answering(json_output) as out:
        arguments = ["show", str(checkpoint), *(["--tensors"] if tensors else [])]
        _, answer = inspect_checkpoints(out, "reading", *arguments)
        out.console.print(_summary(answer))
        out.console.print(_kinds(answer["kinds"]))
        if tensors:
            out.console.print(_tensors(answer["tensors"]))
        out.result(answer)


def _summary(answer: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    model = {name: value for name, value in (answer["model"] or {}).items() if value is not None}
    rows = {
        "directory": answer["directory"],
        "job": answer["job"],
        "step": f"{answer['step']:,}, {answer['consumed_samples']:,} samples consumed",
        "generation": str(answer["generation"]),
        "saved": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(answer["saved_at"])),
        "layout": layout_text(answer["layout"]),
        "size": f"{decimal(answer['num_bytes'])} in {answer['num_files']} files",
        "tensors": f"{answer['num_tensors']:,} in {answer['num_boxes']:,} boxes",
        "format": f"version {answer['format_version']}",
        "written by": ", ".join(f"{name} {version}" for name, version in answer["versions"].items()),
        "model": ", ".join(f"{name} {value}" for name, value in model.items()),
        "extra state": ", ".join(answer["extra"]) or "none",
    }
    for name, value in rows.items():
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _kinds(kinds: dict[str, dict[str, Any]]) -> Table:
    table = Table("kind", "tensors", "elements", "size", "dtype")
    for kind, one in kinds.items():
        dtypes = ", ".join(one["dtypes"])
        table.add_row(kind, f"{one['tensors']:,}", f"{one['elements']:,}", decimal(one["num_bytes"]), dtypes)
    return table


def _tensors(tensors: list[dict[str, Any]]) -> Table:
    table = Table("tensor", "shape", "dtype", "boxes", "files")
    for one in tensors:
        shape = Text(str(one["shape"]))
        table.add_row(Text(one["name"]), shape, one["dtype"], str(one["boxes"]), str(len(one["files"])))
    return table
