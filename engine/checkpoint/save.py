"""Saving: every rank writes the pieces it owns, rank 0 publishes the manifest, and all learn how it went.

Three parts, so that a background writer can take over the last two: plan (``plan_shard``), write (``write_shard``),
publish (``publish``). Between them the ranks exchange results, so a failure on one of them is a failure on all and
nobody waits for a rank that gave up.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.agreement import agree
from engine.checkpoint.catalog import directory_name, remove
from engine.checkpoint.errors import CheckpointError, CheckpointSaveError, CheckpointSuperseded
from engine.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    TensorEntry,
    coverage_problems,
    manifest_bytes,
)
from engine.checkpoint.pieces import Piece, tensors_of
from engine.checkpoint.shard import (
    plan_shard,
    save_error,
    shard_file,
    sync_directory,
    write_all,
    write_shard,
)
from engine.groups import Group
from engine.planning.config import RunConfig
from engine.planning.layout import Layout

CPU = torch.device("cpu")


@dataclass(frozen=True)
class SaveResult:
    """A published checkpoint. ``num_bytes`` is the size of all shards, ``seconds`` how long this rank took."""

    step: int
    generation: int
    directory: Path
    num_bytes: int
    seconds: float


def save_checkpoint(
    pieces: Sequence[Piece],
    directory: Path,
    group: Group,
    *,
    job: str,
    generation: int,
    step: int,
    run: RunConfig,
    layout: Layout,
    consumed_samples: int | None = None,
    extra: Mapping[str, Any] | None = None,
    device: torch.device = CPU,
    still_current: Callable[[], bool] | None = None,
) -> SaveResult:
    """Save the state after ``step`` completed steps below ``directory``; every member of ``group`` calls it.

    ``consumed_samples`` is the position in the data, ``step`` global batches when not given. ``extra`` is what else
    the training state needs and has to fit in JSON. ``device`` is where the group's collectives want their tensors.
    ``still_current`` is asked on rank 0 right before publishing; when it says no, all ranks raise
    CheckpointSuperseded. When any rank fails, all raise CheckpointSaveError and the checkpoint's directory is removed.
    The pieces must not change meanwhile.
    """
    began = time.monotonic()
    target = directory / directory_name(step, generation)
    described = Manifest(
        job=job,
        generation=generation,
        step=step,
        consumed_samples=step * run.train.global_batch_size if consumed_samples is None else consumed_samples,
        saved_at=time.time(),
        tensors={},
        files={},
        layout=layout.model_dump(mode="json"),
        run=run.model_dump(mode="json"),
        extra=dict(extra or {}),
        versions={"torch": torch.__version__, "python": platform.python_version()},
    )

    def prepare() -> tuple[int, int]:
        if group.rank == 0:
            _fresh(target)
        return step, generation

    saved = agree(group, device, prepare)
    assert all(tuple(s) == (step, generation) for s in saved), f"ranks save different steps: {saved}"
    try:
        shards = agree(group, device, lambda: _save_shard(pieces, target, described, group.rank))

        def finish() -> int:
            if group.rank != 0:
                return 0
            manifest = _merge(shards, described, target)
            publish(manifest, target, still_current)
            return manifest.num_bytes

        num_bytes = agree(group, device, finish)[0]
    except CheckpointError as failure:
        # All ranks have told of their outcome, so none still writes and rank 0 can clear away what they left. When the
        # exchange itself breaks (a dead peer) the directory stays: it may just have been published.
        if group.rank == 0:
            try:
                remove(target)
            except OSError as error:
                failure.add_note(f"what the save left could not be removed: {error}")
        raise
    return SaveResult(step, generation, target, num_bytes, time.monotonic() - began)


def _fresh(target: Path) -> None:
    """Make the checkpoint's directory, without what an earlier try may have left in it."""
    try:
        if (target / MANIFEST).exists():
            raise CheckpointSaveError(str(target), "there is a complete checkpoint of this step and generation already")
        if target.exists():
            remove(target)
        target.mkdir(parents=True)
        sync_directory(target.parent)
    except OSError as error:
        raise save_error(target, error) from error


def _save_shard(pieces: Sequence[Piece], target: Path, described: Manifest, rank: int) -> dict[str, Any]:
    """Write this rank's owned pieces; returns what rank 0 needs to know, as JSON. No owned piece, no file."""
    owned = [p for p in pieces if p.owned]
    files = {}
    if owned:
        plan = plan_shard(owned, {"job": described.job, "step": str(described.step), "rank": str(rank)})
        files[shard_file(rank)] = write_shard(plan, target / shard_file(rank))
    return {
        "tensors": {name: t.model_dump(mode="json") for name, t in tensors_of(pieces).items()},
        "files": {name: f.model_dump(mode="json") for name, f in files.items()},
    }


def _merge(shards: Sequence[dict[str, Any]], described: Manifest, target: Path) -> Manifest:
    """``described`` with what all ranks wrote; CheckpointSaveError when that is not each tensor exactly once."""
    tensors: dict[str, TensorEntry] = {}
    files: dict[str, FileEntry] = {}
    for shard in shards:
        for name, value in shard["tensors"].items():
            entry = TensorEntry.model_validate(value)
            if tensors.setdefault(name, entry) != entry:
                raise CheckpointSaveError(str(target), f"ranks disagree on {name}: {tensors[name]} and {entry}")
        files.update({name: FileEntry.model_validate(value) for name, value in shard["files"].items()})
    manifest = Manifest(**{**dict(described), "tensors": dict(sorted(tensors.items())), "files": files})
    problems = coverage_problems(manifest)
    if problems:
        raise CheckpointSaveError(str(target), "; ".join(problems))
    return manifest


def publish(manifest: Manifest, target: Path, still_current: Callable[[], bool] | None = None) -> None:
    """Make the checkpoint in ``target`` complete: check its files, then put the manifest in place, durably.

    The rename is the moment from which readers see the checkpoint. Raises CheckpointSaveError, or CheckpointSuperseded
    when ``still_current`` says no.
    """
    aside = target / f"{MANIFEST}.tmp-{os.getpid()}"
    try:
        for name, file in manifest.files.items():
            # Not so when the ranks' directories are not one shared directory.
            size = (target / name).stat().st_size
            if size != file.num_bytes:
                raise CheckpointSaveError(str(target / name), f"has {size} bytes, {file.num_bytes} were written")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, memoryview(manifest_bytes(manifest)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_directory(target)
        if still_current is not None and not still_current():
            raise CheckpointSuperseded(f"{target}: generation {manifest.generation} is no longer the current one")
        aside.rename(target / MANIFEST)
        sync_directory(target)
    except OSError as error:
        raise save_error(aside, error) from error
