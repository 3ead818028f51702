"""What checkpoints are, in words and numbers: the tables and objects that people and scripts get to see."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.catalog import CheckpointEntry, is_complete, list_checkpoints, list_directories, parse_name
from engine.checkpoint.errors import CheckpointDamaged
from engine.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from engine.checkpoint.quarantine import SetAside, is_set_aside, list_set_aside
from engine.checkpoint.retention import history_on_disk
from engine.checkpoint.verify import Finding


def is_checkpoint_directory(directory: Path) -> bool:
    """Whether ``directory`` is that of one checkpoint, complete or not, set aside or not, whatever its name is."""
    named = parse_name(directory.name) is not None or is_set_aside(directory)
    return (directory / MANIFEST).exists() or (named and directory.is_dir())


def checkpoints_directory(directory: Path) -> Path:
    """The directory of the checkpoints, given that or a job's run directory.

    Raises FileNotFoundError when it does not exist, ValueError when there are no checkpoints in it.
    """
    if is_checkpoint_directory(directory):
        raise ValueError(f"{directory} is a checkpoint itself; name the directory that it is in")
    for place in (directory / "checkpoints", directory):
        if list_directories(place) or list_set_aside(place):
            return place
    if not directory.is_dir():
        raise FileNotFoundError(2, "no such directory", str(directory))
    raise ValueError(f"{directory} holds no checkpoints, and neither does a directory checkpoints in it")


def list_all(directory: Path) -> list[dict[str, Any]]:
    """Everything in a directory of checkpoints, newest first.

    ``state``: ``complete``; ``superseded``, complete but a later generation started before it; ``incomplete``, on its
    way or left over from a save that never ended; ``quarantined``. ``num_bytes`` of an incomplete one is what its
    files have, ``saved_at`` when it changed last. ``problem`` says why a manifest cannot be read, or why it was
    quarantined.
    """
    counted = {entry.directory for entry in list_checkpoints(directory, history_on_disk(directory))}
    entries: list[tuple[CheckpointEntry | SetAside, str]] = [
        (aside, "quarantined") for aside in list_set_aside(directory)
    ]
    for entry in list_directories(directory):
        state = "complete" if entry.directory in counted else "superseded" if is_complete(entry) else "incomplete"
        entries.append((entry, state))
    rows = []
    for one, state in entries:
        try:
            rows.append(_row(one, state))
        except FileNotFoundError:
            continue  # deleted meanwhile
    return sorted(rows, key=lambda row: (row["step"], row["generation"]), reverse=True)


def _row(entry: CheckpointEntry | SetAside, state: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "directory": str(entry.directory),
        "step": entry.step,
        "generation": entry.generation,
        "state": state,
        "num_bytes": _size(entry.directory),
        "saved_at": entry.directory.stat().st_mtime,
        "layout": None,
        "problem": entry.reason or None if isinstance(entry, SetAside) else None,
    }
    if state == "incomplete":
        return row
    try:
        manifest = read_manifest(entry.directory)
    except CheckpointDamaged as damage:
        return {**row, "problem": row["problem"] or str(damage)}
    return {**row, "num_bytes": manifest.num_bytes, "saved_at": manifest.saved_at, "layout": manifest.layout}


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if path.is_file())


@dataclass(frozen=True)
class KindSummary:
    """All tensors of one kind (``weight``, ``exp_avg``, ``exp_avg_sq``): how many, elements, bytes, dtypes."""

    tensors: int
    elements: int
    num_bytes: int
    dtypes: dict[str, int]


def kind_of(tensor: str) -> str:
    """The kind of a tensor: what stands before the first slash of its name."""
    return tensor.partition("/")[0]


def show(directory: Path, manifest: Manifest, *, tensors: bool = False) -> dict[str, Any]:
    """What a manifest says. ``tensors``: with one object for each tensor."""
    elements: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    dtypes: dict[str, Counter[str]] = {}
    for name, tensor in manifest.tensors.items():
        kind = kind_of(name)
        elements[kind] += tensor.numel
        num_bytes[kind] += tensor.numel * tensor.itemsize
        dtypes.setdefault(kind, Counter())[tensor.dtype] += 1
    kinds = {k: asdict(KindSummary(d.total(), elements[k], num_bytes[k], dict(d))) for k, d in dtypes.items()}
    boxes = manifest.boxes_by_tensor()
    answer = {
        "directory": str(directory),
        "format_version": manifest.format_version,
        "job": manifest.job,
        "step": manifest.step,
        "generation": manifest.generation,
        "consumed_samples": manifest.consumed_samples,
        "saved_at": manifest.saved_at,
        "layout": manifest.layout,
        "model": manifest.run.get("model"),
        "run": manifest.run,
        "extra": manifest.extra,
        "versions": manifest.versions,
        "num_bytes": manifest.num_bytes,
        "num_files": len(manifest.files),
        "num_tensors": len(manifest.tensors),
        "num_boxes": sum(map(len, boxes.values())),
        "kinds": kinds,
    }
    if tensors:
        answer["tensors"] = [
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "boxes": len(boxes[name]),
                "files": sorted({file for file, _ in boxes[name]}),
            }
            for name, tensor in manifest.tensors.items()
        ]
    return answer


def finding_object(finding: Finding) -> dict[str, Any]:
    """One thing that is wrong, as a JSON object."""
    return {
        "file": finding.damage.file,
        "tensor": finding.tensor,
        "box": None if finding.box is None else str(finding.box),
        "reason": finding.damage.reason,
    }
