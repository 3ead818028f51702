"""``everstep checkpoint convert``: checkpoints from and to other programs' formats, over the engine's program."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from everstep.cli.engine_program import run_program
from everstep.cli.options import JsonOption
from everstep.cli.output import BadInput, OperationFailed, Output, answering

_MODULE = "engine.checkpoint.convert"
_INPUT_AT_FAULT, _USAGE = 1, 2  # its exit codes


class Format(StrEnum):
    """Formats of checkpoints."""

    EVERSTEP = "everstep"
    HF = "hf"
    DCP = "dcp"


class Dtype(StrEnum):
    """How exported weights are stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Directory to read.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory to make.")],
    kind_from: Annotated[Format, typer.Option("--from", help="Format of SRC.")],
    kind_to: Annotated[Format, typer.Option("--to", help="Format of DST.")],
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="To hf: how weights are stored; fp32 when not given.")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", help="To hf: largest size of a file; 5GB when not given.")
    ] = None,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="From dcp: read SRC although its metadata is a pickle.")
    ] = False,
    model_config: Annotated[
        Path | None, typer.Option("--model-config", help="From dcp: JSON file with the settings of the model.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a DST that is of the same kind.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Convert one checkpoint from or to Hugging Face (GPT-2, Llama) or torch DCP, all or nothing."""
    with answering(json_output) as out:
        arguments = ["--from", kind_from.value, "--to", kind_to.value, "--progress-json"]
        if dtype is not None:
            arguments += ["--dtype", dtype.value]
        if max_shard_size is not None:
            arguments += ["--max-shard-size", max_shard_size]
        if model_config is not None:
            arguments += ["--model-config", str(model_config)]
        arguments += ["--trust-pickle"] * trust_pickle + ["--overwrite"] * overwrite
        summary = _convert(out, [*arguments, "--", str(source), str(target)])
        out.say(
            f"{escape(summary['output'])}: {summary['parameters']:,} parameters in {summary['tensors']} tensors, "
            f"{summary['num_bytes']:,} bytes in {summary['files']} files, {summary['seconds']:.1f} s"
        )
        out.result(summary)


def _convert(output: Output, arguments: list[str]) -> dict[str, Any]:
    """Run the engine's conversion with a progress bar; returns its summary. Raises BadInput, OperationFailed."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=output.console) as progress:
        task = progress.add_task("converting", total=None)

        def on_line(line: dict[str, Any]) -> None:
            if line.get("kind") == "progress":
                progress.update(task, completed=line["bytes_done"], total=line["bytes_total"])

        code, last, errors = run_program(_MODULE, arguments, on_line)
    if code == 0 and last is not None:
        return {name: value for name, value in last.items() if name != "kind"}
    message = str(last["error"]) if last is not None and last.get("kind") == "error" else errors or f"exit code {code}"
    if code in (_INPUT_AT_FAULT, _USAGE):
        raise BadInput(message)
    raise OperationFailed(message)
