"""Look at checkpoints: ``python -m engine.checkpoint.inspect list|show|verify|diff|prune|quarantine|release ...``.

Prints lines of JSON: ``{"kind": "progress", "bytes_done", "bytes_total"}`` while bytes are read, at last one
``{"kind": "result", ...}`` or ``{"kind": "error", "error"}``. Exit codes: 0 all is well, 1 something damaged or
different was found or the operation failed, 2 the input cannot be right.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from engine.checkpoint.catalog import CheckpointEntry, delete, is_complete, list_directories
from engine.checkpoint.describe import (
    checkpoints_directory,
    finding_object,
    is_checkpoint_directory,
    kind_of,
    list_all,
    show,
)
from engine.checkpoint.difference import TensorDifference, comparable, differences
from engine.checkpoint.errors import CheckpointDamaged
from engine.checkpoint.manifest import Manifest, read_manifest
from engine.checkpoint.quarantine import release, set_aside
from engine.checkpoint.retention import plan_prune
from engine.checkpoint.verify import examine

_PROGRESS_INTERVAL_S = 0.25
_LISTED_DIFFERENCES = 1000

GOOD = 0
FOUND = 1
BAD_INPUT = 2

Answer = tuple[int, dict[str, Any]]


class ProgressLines:
    """Counts bytes and prints a line now and then. ``bytes_total`` may be unknown."""

    def __init__(self, bytes_total: int | None = None) -> None:
        self.bytes_total = bytes_total
        self.bytes_done = 0
        self._began = time.monotonic()
        self._next = self._began

    def add(self, num_bytes: int) -> None:
        """``num_bytes`` more were read."""
        self.bytes_done += num_bytes
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PROGRESS_INTERVAL_S
            _line("progress", {"bytes_done": self.bytes_done, "bytes_total": self.bytes_total})

    def figures(self) -> dict[str, Any]:
        """How much was read in what time."""
        return {"bytes_read": self.bytes_done, "seconds": round(time.monotonic() - self._began, 3)}


def _line(kind: str, values: dict[str, Any]) -> None:
    print(json.dumps({"kind": kind, **values}, allow_nan=False), flush=True)


def _manifest_of(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint that the user named."""
    if not checkpoint.is_dir():
        raise FileNotFoundError(2, "no such directory", str(checkpoint))
    return read_manifest(checkpoint)


def _sizes(checkpoints: Iterable[Path]) -> int:
    """Bytes of what can be read in these checkpoints; of one whose manifest is damaged nothing is."""
    total = 0
    for checkpoint in checkpoints:
        try:
            total += read_manifest(checkpoint).num_bytes
        except CheckpointDamaged:
            continue
    return total


def run_list(options: argparse.Namespace) -> Answer:
    """All checkpoints of a directory."""
    directory = checkpoints_directory(options.directory)
    return GOOD, {"directory": str(directory), "checkpoints": list_all(directory)}


def run_show(options: argparse.Namespace) -> Answer:
    """The manifest of one checkpoint."""
    return GOOD, show(options.checkpoint, _manifest_of(options.checkpoint), tensors=options.tensors)


def run_verify(options: argparse.Namespace) -> Answer:
    """Every byte of one checkpoint, or of all complete ones of a directory."""
    place: Path = options.place
    chosen = [place]
    if not is_checkpoint_directory(place):
        directory = checkpoints_directory(place)
        chosen = [entry.directory for entry in list_directories(directory) if is_complete(entry)]
        if not chosen:
            raise ValueError(f"{directory} holds no complete checkpoint")
    progress = ProgressLines(_sizes(chosen))
    checked = []
    for checkpoint in chosen:
        findings = [finding_object(finding) for finding in examine(checkpoint, progress.add)]
        checked.append({"directory": str(checkpoint), "good": not findings, "findings": findings})
    good = all(one["good"] for one in checked)
    return GOOD if good else FOUND, {"good": good, "checkpoints": checked, **progress.figures()}


def run_diff(options: argparse.Namespace) -> Answer:
    """Two checkpoints, tensor by tensor."""
    if options.tolerance is not None and not 0 <= options.tolerance < math.inf:
        raise ValueError(f"tolerance {options.tolerance} is no finite number from 0 on")
    first, second = _manifest_of(options.first), _manifest_of(options.second)
    compared = comparable(first, second)
    progress = ProgressLines(compared.num_bytes)
    kinds: dict[str, dict[str, Any]] = {}
    different: list[dict[str, Any]] = []
    same = not compared.problems
    for found in differences(options.first, options.second, (first, second), compared.common, progress.add):
        same &= found.within(options.tolerance)
        _count(kinds.setdefault(kind_of(found.name), _no_difference()), found)
        if not found.equal:
            different.append({"tensor": found.name, "numel": found.numel, **_numbers(found)})
    different.sort(key=lambda one: (-one["num_incomparable"], -one["max_abs"]))
    return GOOD if same else FOUND, {
        "same": same,
        "bit_equal": not compared.problems and not different,
        "tolerance": options.tolerance,
        "first": _origin(options.first, first),
        "second": _origin(options.second, second),
        "problems": list(compared.problems),
        "kinds": kinds,
        "num_different": len(different),
        "different": different[:_LISTED_DIFFERENCES],
        **progress.figures(),
    }


def _no_difference() -> dict[str, Any]:
    return {"tensors": 0, "bit_equal": 0, "num_different": 0, "max_abs": 0.0, "num_incomparable": 0}


def _numbers(found: TensorDifference) -> dict[str, Any]:
    return {
        "num_different": found.num_different,
        "max_abs": found.max_abs,
        "num_incomparable": found.num_incomparable,
    }


def _count(kind: dict[str, Any], found: TensorDifference) -> None:
    kind["tensors"] += 1
    kind["bit_equal"] += found.equal
    kind["num_different"] += found.num_different
    kind["max_abs"] = max(kind["max_abs"], found.max_abs)
    kind["num_incomparable"] += found.num_incomparable


def _origin(directory: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "directory": str(directory),
        "step": manifest.step,
        "generation": manifest.generation,
        "consumed_samples": manifest.consumed_samples,
        "layout": manifest.layout,
    }


def run_prune(options: argparse.Namespace) -> Answer:
    """What retention would delete, and with ``--yes`` its deletion."""
    directory = checkpoints_directory(options.directory)
    progress = ProgressLines()
    plan = plan_prune(directory, options.keep, progress.add)
    deleted = delete(plan.expendable) if options.yes else []
    damaged = [
        {**_entry(entry), "findings": [finding_object(finding) for finding in findings]}
        for entry, findings in plan.damaged
    ]
    return FOUND if damaged else GOOD, {
        "directory": str(directory),
        "dry_run": not options.yes,
        "kept": [_entry(entry) for entry in plan.kept],
        "damaged": damaged,
        "expendable": [_entry(entry) for entry in plan.expendable],
        "deleted": [str(path) for path in deleted],
        "note": plan.note,
        **progress.figures(),
    }


def _entry(entry: CheckpointEntry) -> dict[str, Any]:
    return {"directory": str(entry.directory), "step": entry.step, "generation": entry.generation}


def run_quarantine(options: argparse.Namespace) -> Answer:
    """Set a checkpoint aside."""
    checkpoint = options.checkpoint.resolve()
    return GOOD, {"directory": str(set_aside(checkpoint, options.reason)), "was": str(checkpoint)}


def run_release(options: argparse.Namespace) -> Answer:
    """Take a checkpoint back that was set aside."""
    checkpoint = options.checkpoint.resolve()
    return GOOD, {"directory": str(release(checkpoint)), "was": str(checkpoint)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.checkpoint.inspect", description="Look at checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("list")
    one.add_argument("directory", type=Path)
    one.set_defaults(run=run_list)
    one = commands.add_parser("show")
    one.add_argument("checkpoint", type=Path)
    one.add_argument("--tensors", action="store_true")
    one.set_defaults(run=run_show)
    one = commands.add_parser("verify")
    one.add_argument("place", type=Path, help="a checkpoint, or a directory of them")
    one.set_defaults(run=run_verify)
    one = commands.add_parser("diff")
    one.add_argument("first", type=Path)
    one.add_argument("second", type=Path)
    one.add_argument("--tolerance", type=float, help="largest absolute difference; bit-equal when not given")
    one.set_defaults(run=run_diff)
    one = commands.add_parser("prune")
    one.add_argument("directory", type=Path)
    one.add_argument("--keep", type=int, required=True)
    one.add_argument("--yes", action="store_true", help="delete; without it nothing is")
    one.set_defaults(run=run_prune)
    one = commands.add_parser("quarantine")
    one.add_argument("checkpoint", type=Path)
    one.add_argument("--reason", required=True)
    one.set_defaults(run=run_quarantine)
    one = commands.add_parser("release")
    one.add_argument("checkpoint", type=Path)
    one.set_defaults(run=run_release)
    return parser


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module's text for what it prints and its exit codes."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    try:
        code, answer = options.run(options)
    except CheckpointDamaged as damage:
        _line("error", {"error": str(damage), "file": damage.file})
        return FOUND
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        _line("error", {"error": f"{error.strerror}: {error.filename}"})
        return BAD_INPUT
    except ValueError as error:
        _line("error", {"error": str(error)})
        return BAD_INPUT
    except OSError as error:
        _line("error", {"error": f"{error.strerror or error}: {error.filename}"})
        return FOUND
    _line("result", answer)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
