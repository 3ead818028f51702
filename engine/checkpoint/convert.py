"""Checkpoints from and to other programs' formats, all or nothing.

``python -m engine.checkpoint.convert --from hf|everstep|dcp --to hf|everstep|dcp SRC DST``

One side is Everstep's: the directory of one checkpoint, ``.../checkpoints/step-N.gM``. ``hf`` is a directory with
config.json and safetensors, ``dcp`` one of ``torch.distributed.checkpoint``. Memory is bounded by the largest tensor.

Exit codes: 0 DST is written; 1 SRC or DST is at fault; 2 bad usage; 130 and 143 ended by SIGINT and SIGTERM. After any
but 0 there is no new DST and an older one is untouched.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import ValidationError

from engine.checkpoint.conversion import Converted, OnProgress, Progress, read_json
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.export_huggingface import DEFAULT_SHARD_BYTES, DTYPES, export_huggingface
from engine.checkpoint.import_huggingface import import_huggingface
from engine.planning.config import ModelConfig

_PROGRESS_INTERVAL_S = 0.5
_FORMATS = ("everstep", "hf", "dcp")
_OPTIONS = {
    ("hf", "everstep"): set[str](),
    ("everstep", "hf"): {"dtype", "max_shard_size"},
    ("everstep", "dcp"): set[str](),
    ("dcp", "everstep"): {"trust_pickle", "model_config"},
}
"""The conversions, and which options have a meaning for each."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def size_bytes(text: str) -> int:
    """``5GB``, ``200MB``, ``64KB`` or a plain number, in bytes. Raises ValueError."""
    match = re.fullmatch(r"([1-9]\d*) ?(KB|MB|GB|)", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size such as 5GB, 200MB or 1000000")
    return int(match[1]) * _UNITS[match[2].upper()]


def _size(text: str) -> int:
    try:
        return size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _Console:
    """Progress and summary on stdout, errors on stderr."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._next_progress = 0.0

    def event(self, kind: str, values: dict[str, Any]) -> None:
        """One line on stdout when lines of JSON are wanted."""
        if self._as_json:
            print(json.dumps({"kind": kind, **values}), flush=True)

    def progress(self, progress: Progress) -> None:
        """At the beginning, twice a second, and at the end."""
        now = time.monotonic()
        if now >= self._next_progress or progress.tensors_done == progress.tensors_total:
            self._next_progress = now + _PROGRESS_INTERVAL_S
            self.event("progress", asdict(progress))

    def summary(self, converted: Converted, seconds: float) -> None:
        """The last line."""
        self.event("summary", {**asdict(converted), "seconds": round(seconds, 3)})
        if not self._as_json:
            print(
                f"{converted.output}: {converted.parameters} parameters in {converted.tensors} tensors, "
                f"{converted.num_bytes} bytes in {converted.files} files, {seconds:.1f} s"
            )

    def error(self, text: str) -> None:
        """The last line of a run that failed."""
        self.event("error", {"error": text})
        print(f"error: {text}", file=sys.stderr)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _convert(options: argparse.Namespace, on_progress: OnProgress) -> Converted:
    source, target, overwrite = options.source, options.target, options.overwrite
    if options.kind_from == "hf":
        return import_huggingface(source, target, overwrite=overwrite, on_progress=on_progress)
    if options.kind_to == "hf":
        return export_huggingface(
            source,
            target,
            dtype=options.dtype or "fp32",
            max_shard_bytes=options.max_shard_size or DEFAULT_SHARD_BYTES,
            overwrite=overwrite,
            on_progress=on_progress,
        )
    # Imported here, for it takes as long as everything else together and the other conversions do without.
    from engine.checkpoint.torch_dcp import export_dcp, import_dcp

    if options.kind_to == "dcp":
        return export_dcp(source, target, overwrite=overwrite, on_progress=on_progress)
    model = None
    if options.model_config is not None:
        model = ModelConfig.model_validate(read_json(options.model_config))
    return import_dcp(
        source,
        target,
        model=model,
        trust_pickle=bool(options.trust_pickle),
        overwrite=overwrite,
        on_progress=on_progress,
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.checkpoint.convert", description="Convert a checkpoint from or to another format."
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="directory to read")
    parser.add_argument("target", metavar="DST", type=Path, help="directory to make")
    parser.add_argument("--from", dest="kind_from", required=True, choices=_FORMATS, help="format of SRC")
    parser.add_argument("--to", dest="kind_to", required=True, choices=_FORMATS, help="format of DST")
    parser.add_argument("--overwrite", action="store_true", help="replace a DST that is of the same kind")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="to hf: how weights are stored; fp32 when not given")
    parser.add_argument("--max-shard-size", type=_size, help="to hf: largest size of a file; 5GB when not given")
    parser.add_argument(
        "--trust-pickle", action="store_true", default=None, help="from dcp: read SRC although its metadata is a pickle"
    )
    parser.add_argument("--model-config", type=Path, help="from dcp: JSON file with the settings of the model")
    parser.add_argument("--progress-json", action="store_true", help="progress and summary as lines of JSON on stdout")
    options = parser.parse_args(arguments)
    kinds = options.kind_from, options.kind_to
    if kinds not in _OPTIONS:
        parser.error(f"--from {kinds[0]} --to {kinds[1]}: one of them, not both, has to be everstep")
    for name in ("dtype", "max_shard_size", "trust_pickle", "model_config"):
        if getattr(options, name) is not None and name not in _OPTIONS[kinds]:
            parser.error(f"--{name.replace('_', '-')} has no meaning from {kinds[0]} to {kinds[1]}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module's text for exit codes."""
    options = _options(arguments)
    # Both become exceptions, so that what was written aside is removed.
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    console = _Console(options.progress_json)
    begin = time.monotonic()
    try:
        converted = _convert(options, console.progress)
    except ValidationError as error:
        first = error.errors()[0]
        console.error(f"model.{'.'.join(map(str, first['loc']))}: {first['msg']}")
        return 1
    except (ValueError, OSError, CheckpointError) as error:
        console.error(_text(error))
        return 1
    console.summary(converted, time.monotonic() - begin)
    return 0


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
