"""``everstep checkpoint list``."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from everstep.cli.checkpoint_program import DirectoryArgument, inspect_checkpoints, layout_text
from everstep.cli.options import JsonOption
from everstep.cli.output import answering

_STYLES = {"complete": "green", "superseded": "dim", "incomplete": "yellow", "quarantined": "red"}


def list_checkpoints(directory: DirectoryArgument, json_output: JsonOption = False) -> None:
    """List checkpoints, newest first: complete, superseded, incomplete and quarantined ones."""
    with answering(json_output) as out:
        _, answer = inspect_checkpoints(out, "reading", "list", str(directory))
        out.console.print(_table(answer["checkpoints"], time.time()))
        out.result(answer)


def _table(rows: list[dict[str, Any]], now: float) -> Table:
    table = Table("name", "state", "size", "age", "layout", "problem")
    for row in rows:
        table.add_row(
            Text(Path(row["directory"]).name, no_wrap=True),
            Text(row["state"], style=_STYLES[row["state"]]),
            decimal(row["num_bytes"]),
            str(timedelta(seconds=max(0, round(now - row["saved_at"])))),
            layout_text(row["layout"]),
            Text(row["problem"] or "", style="red"),
        )
    return table
