"""Loading: each rank asks for its boxes, whatever layout it has and whatever layout wrote them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.agreement import agree
from engine.checkpoint.boxes import Box, first_gap
from engine.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from engine.checkpoint.manifest import MANIFEST, Manifest, TensorEntry, read_manifest
from engine.checkpoint.pieces import Piece, tensors_of
from engine.checkpoint.reader import Reader
from engine.checkpoint.sources import DiskSource, Source
from engine.groups import Group
from engine.models.frozen import matching

CPU = torch.device("cpu")
ALONE = Group("alone", (0,), 0, None)


@dataclass(frozen=True)
class LoadResult:
    """What a load did on this rank. ``bytes_needed`` is the size of its pieces, ``bytes_read`` what they cost."""

    manifest: Manifest
    bytes_needed: int
    bytes_read: int
    seconds: float


def load_checkpoint(
    pieces: Sequence[Piece], directory: Path, group: Group = ALONE, *, device: torch.device = CPU
) -> LoadResult:
    """Fill all ``pieces``, owned or not, from the checkpoint in ``directory``; every member of ``group`` calls it.

    The pieces of all members together have to be the whole model. Without ``group`` this process has all of it.
    Frozen parameters have no moments: those of a parameter that was frozen when the checkpoint was made and is trained
    now become zero, and those of a parameter that is frozen now are left where they are.
    ``device`` is where the group's collectives want their tensors. Raises the same on all ranks: CheckpointMismatch,
    before anything is written, when the pieces of all ranks together are not the tensors of the checkpoint;
    CheckpointDamaged when a manifest or a needed byte is missing or altered on any rank; CheckpointError when only some
    ranks see the checkpoint at all, which is no fault of the checkpoint's. After CheckpointDamaged the pieces hold a
    mixture and must not be used before another load.
    """
    began = time.monotonic()
    _look_together(directory / MANIFEST, group, device)
    loaded: list[Manifest] = []

    def look() -> dict[str, dict[str, object]]:
        loaded.append(read_manifest(directory))
        return {name: entry.model_dump(mode="json") for name, entry in tensors_of(pieces).items()}

    model: dict[str, TensorEntry] = {}
    for tensors in agree(group, device, look):
        model.update({name: TensorEntry.model_validate(value) for name, value in tensors.items()})
    (manifest,) = loaded
    check_model(manifest, model)

    source = DiskSource(directory)
    try:
        agree(group, device, lambda: _fill(pieces, manifest, source))
    finally:
        source.close()
    needed = sum(p.data.numel() * p.dtype.itemsize for p in pieces)
    return LoadResult(manifest, needed, source.bytes_read, time.monotonic() - began)


def _look_together(manifest: Path, group: Group, device: torch.device) -> None:
    """Raise CheckpointError on all ranks when only some see ``manifest``: the others lack the file system."""
    seen = agree(group, device, manifest.exists)
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if 0 < len(blind) < group.size:
        error = CheckpointError(f"{manifest} is not there for ranks {blind}, for others it is: is the place shared?")
        error.elsewhere = seen[group.rank]
        raise error


def _fill(pieces: Sequence[Piece], manifest: Manifest, source: Source) -> None:
    """Read the pieces that ``manifest``, which ``check_model`` approved of, has; the others are moments: zero."""
    for piece in pieces:
        if piece.name not in manifest.tensors:
            piece.data.detach().zero_()
    read_pieces([piece for piece in pieces if piece.name in manifest.tensors], manifest, source)


def check_model(manifest: Manifest, model: Mapping[str, TensorEntry]) -> None:
    """Raise CheckpointMismatch, with every difference, unless the checkpoint has the tensors of ``model``.

    They differ rightly in the moments of a parameter that was frozen when the checkpoint was made, as the settings in
    the manifest say, and is not frozen in the model, or the other way round.
    """
    frozen_then, frozen_now = _frozen_then(manifest), _frozen_now(model)
    differences = []
    for name in sorted(manifest.tensors.keys() | model.keys()):
        stored, wanted = manifest.tensors.get(name), model.get(name)
        if (stored is None and name in frozen_then) or (wanted is None and name in frozen_now):
            continue
        if stored is None:
            differences.append(f"{name}: not in the checkpoint")
        elif wanted is None:
            differences.append(f"{name}: in the checkpoint, not in the model")
        elif stored.shape != wanted.shape:
            differences.append(f"{name}: shape {stored.shape} in the checkpoint, {wanted.shape} in the model")
        elif stored.dtype != wanted.dtype:
            differences.append(f"{name}: dtype {stored.dtype} in the checkpoint, {wanted.dtype} in the model")
    if differences:
        raise CheckpointMismatch(differences)


def _frozen_then(manifest: Manifest) -> set[str]:
    """Moments that the checkpoint rightly lacks: their parameters were frozen in the run that wrote it."""
    patterns = manifest.run.get("train", {}).get("frozen", [])
    weights = (name.removeprefix("weight/") for name in manifest.tensors if name.startswith("weight/"))
    return {moment for name in matching(patterns, weights) for moment in _moments(name)}


def _frozen_now(model: Mapping[str, TensorEntry]) -> set[str]:
    """Moments that the model rightly lacks: those of weights that have none at all."""
    weights = (name.removeprefix("weight/") for name in model if name.startswith("weight/"))
    return {moment for name in weights if model.keys().isdisjoint(_moments(name)) for moment in _moments(name)}


def _moments(name: str) -> tuple[str, str]:
    return f"exp_avg/{name}", f"exp_avg_sq/{name}"


@torch.no_grad()
def read_pieces(pieces: Sequence[Piece], manifest: Manifest, source: Source) -> None:
    """Fill the pieces from ``source``: of each stored box the part that a piece shares with it.

    The pieces' names, shapes and dtypes have to be those of the manifest. Every file is looked at before a byte is
    written. Raises CheckpointDamaged.
    """
    stored = manifest.boxes_by_tensor()
    reader = Reader(source, manifest.files)
    parts = []
    for piece in pieces:
        found: list[Box] = []
        for file, entry in stored[piece.name]:
            common = entry.box.intersect(piece.box)
            if common is not None:
                found.append(common.relative_to(piece.box))
                parts.append((file, entry, common.relative_to(entry.box), piece.data.detach()[found[-1].slices]))
        gap = first_gap(piece.box.size, found)
        if gap is not None:
            missing = gap.shifted(piece.box.offset)
            raise CheckpointDamaged(source.describe(MANIFEST), f"no stored box has {piece.name} {missing}")
    for file in {file for file, *_ in parts}:
        reader.check_size(file)
    for file, entry, part, target in sorted(parts, key=lambda p: (p[0], p[1].start)):
        reader.read(file, entry, part, target)
