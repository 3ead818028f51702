"""``everstep preprocess``: JSON lines to a ``.bin``/``.idx`` pair, with a progress bar over the engine's program."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from everstep.cli.engine_program import run_program
from everstep.cli.options import JsonOption
from everstep.cli.output import BadInput, OperationFailed, Output, answering

_MODULE = "engine.data.preprocess"
_INPUT_AT_FAULT = 1  # its exit codes: 2 is wrong usage, above that a worker failed


class OnBad(StrEnum):
    """What to do with a line that is no document."""

    SKIP = "skip"
    STRICT = "strict"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def preprocess_corpus(
    output: Output, source: Path, prefix: Path, tokenizer: str, extra: tuple[str, ...] = (), workers: int | None = None
) -> dict[str, Any]:
    """Run the engine's preprocessing with a progress bar; returns its summary.

    Raises BadInput when the input is at fault, OperationFailed when the program is.
    """
    arguments = ["--input", str(source), "--output", str(prefix), "--tokenizer", tokenizer, "--progress-json"]
    arguments += ["--workers", str(workers or num_cores()), *extra]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=output.console) as progress:
        task = progress.add_task("tokenizing", total=None, tokens="0")

        def on_line(line: dict[str, Any]) -> None:
            if line.get("kind") == "progress":
                progress.update(
                    task, completed=line["bytes_done"], total=line["bytes_total"], tokens=f"{line['tokens']:,}"
                )
            elif line.get("kind") == "bad_line":
                progress.console.print(f"line {line['line']}: {line['reason']}: {line['detail']}", markup=False)

        code, last, errors = run_program(_MODULE, arguments, on_line)
        if code == 0 and last is not None:
            size = source.stat().st_size
            progress.update(task, completed=size, total=size, tokens=f"{last['tokens']:,}")
    if code == 0 and last is not None:
        return {name: value for name, value in last.items() if name != "kind"}
    message = str(last["error"]) if last is not None and last.get("kind") == "error" else errors or f"exit code {code}"
    if code in (_INPUT_AT_FAULT, 2):
        raise BadInput(message)
    raise OperationFailed(message)


def preprocess(
    source: Annotated[Path, typer.Option("--input", help="JSON lines, one document each.")],
    prefix: Annotated[Path, typer.Option("--output", help="PREFIX of PREFIX.bin and PREFIX.idx.")],
    tokenizer: Annotated[str, typer.Option("--tokenizer", help="A tokenizer JSON file, or 'bytes'.")],
    text_key: Annotated[str, typer.Option("--text-key", help="Key of the text in each object.")] = "text",
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Worker processes; one a core when not given.")
    ] = None,
    on_bad: Annotated[
        OnBad, typer.Option("--on-bad", help="Skip and count bad lines, or end at the first.")
    ] = OnBad.SKIP,
    json_output: JsonOption = False,
) -> None:
    """Turn JSON lines into a Megatron-compatible .bin/.idx pair, all or nothing."""
    with answering(json_output) as out:
        extra = ("--text-key", text_key, "--on-bad", on_bad.value)
        summary = preprocess_corpus(out, source, prefix, tokenizer, extra, workers)
        bad = ", ".join(f"{count} {reason}" for reason, count in summary["bad"].items())
        out.say(
            f"{prefix}.bin, {prefix}.idx: {summary['documents']:,} documents, {summary['tokens']:,} tokens"
            + (f"; bad lines: {bad}" if bad else "")
        )
        out.result(summary)
