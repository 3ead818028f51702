"""The checkpoints of a job: which there are, which is the newest that counts, and which can go.

A job's checkpoints are directories ``step-<completed steps>.g<generation>`` below one directory. One is complete when
it has a manifest; nothing else, no pointer file and no name, is trusted. What an older generation wrote beyond the
step at which a later one started is a ghost's work and does not count.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.manifest import MANIFEST
from engine.checkpoint.shard import sync_directory
from engine.planning.messages import GenerationStart

_NAME = re.compile(r"step-(\d{9,})\.g(\d+)")


def directory_name(step: int, generation: int) -> str:
    """Name of the directory that ``generation`` writes after ``step`` completed steps."""
    return f"step-{step:09d}.g{generation}"


@dataclass(frozen=True, order=True)
class CheckpointEntry:
    """One checkpoint directory; entries are in order of (step, generation)."""

    step: int
    generation: int
    directory: Path


def _directories(directory: Path) -> list[CheckpointEntry]:
    """All directories with a checkpoint's name, newest first, complete or not."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append(CheckpointEntry(int(match[1]), int(match[2]), path))
    return sorted(found, reverse=True)


def _complete(entry: CheckpointEntry) -> bool:
    return (entry.directory / MANIFEST).is_file()


def _counts(entry: CheckpointEntry, history: Sequence[GenerationStart]) -> bool:
    return not any(later.generation > entry.generation and entry.step > later.start_step for later in history)


def list_checkpoints(directory: Path, history: Sequence[GenerationStart] = ()) -> list[CheckpointEntry]:
    """The complete checkpoints that count, newest first. ``directory`` need not exist yet."""
    return [e for e in _directories(directory) if _complete(e) and _counts(e, history)]


def newest(directory: Path, history: Sequence[GenerationStart] = ()) -> CheckpointEntry | None:
    """The newest complete checkpoint that counts, or None when there is none."""
    return next(iter(list_checkpoints(directory, history)), None)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint's directory, the manifest first: it never looks complete while parts are missing."""
    manifest = checkpoint / MANIFEST
    if manifest.exists():
        manifest.unlink()
        sync_directory(checkpoint)
    shutil.rmtree(checkpoint)


def prune(
    directory: Path,
    keep: int,
    history: Sequence[GenerationStart] = (),
    *,
    protected_steps: Collection[int] = (),
) -> list[Path]:
    """Delete what retention does not keep; returns the deleted directories.

    Kept are the ``keep`` (at least 1) newest complete checkpoints that count, and every checkpoint whose step is in
    ``protected_steps``, such as one that is being restored from. Once there is one that counts, all other complete
    ones are deleted, those of ghosts too. Incomplete directories are deleted when they are of a generation before the
    newest one in ``history``: what the current generation has not completed may be on its way.
    """
    if keep < 1:
        raise ValueError(f"keep {keep}: at least one checkpoint has to stay")
    kept = {e.directory for e in list_checkpoints(directory, history)[:keep]}
    current = max((start.generation for start in history), default=0)
    deleted = []
    for entry in _directories(directory):
        if entry.directory in kept or entry.step in protected_steps:
            continue
        if kept if _complete(entry) else entry.generation < current:
            try:
                remove(entry.directory)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                continue  # a ghost wrote into it meanwhile; the next call finds it again
            deleted.append(entry.directory)
    return deleted
