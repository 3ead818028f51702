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


def parse_name(name: str) -> tuple[int, int] | None:
    """Inverse of ``directory_name``: (step, generation), or None when it is no checkpoint's name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True, order=True)
class CheckpointEntry:
    """One checkpoint directory; entries are in order of (step, generation)."""

    step: int
    generation: int
    directory: Path


def list_directories(directory: Path) -> list[CheckpointEntry]:
    """All directories with a checkpoint's name, newest first, complete or not. ``directory`` need not exist yet."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        named = parse_name(path.name)
        if named and path.is_dir():
            found.append(CheckpointEntry(*named, path))
    return sorted(found, reverse=True)


def is_complete(entry: CheckpointEntry) -> bool:
    """Whether the checkpoint was published. What it holds may still be damaged."""
    return (entry.directory / MANIFEST).is_file()


def _counts(entry: CheckpointEntry, history: Sequence[GenerationStart]) -> bool:
    return not any(later.generation > entry.generation and entry.step > later.start_step for later in history)


def list_checkpoints(directory: Path, history: Sequence[GenerationStart] = ()) -> list[CheckpointEntry]:
    """The complete checkpoints that count, newest first. ``directory`` need not exist yet."""
    return [e for e in list_directories(directory) if is_complete(e) and _counts(e, history)]


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


def expendable(
    directory: Path,
    keep: int,
    history: Sequence[GenerationStart] = (),
    *,
    protected_steps: Collection[int] = (),
) -> list[CheckpointEntry]:
    """What retention does not keep, newest first.

    Kept are the ``keep`` (at least 1) newest complete checkpoints that count, and every checkpoint whose step is in
    ``protected_steps``, such as one that is being restored from. Once there is one that counts, all other complete
    ones can go, those of ghosts too. Incomplete directories can go when they are of a generation before the newest
    one in ``history``: what the current generation has not completed may be on its way.
    """
    if keep < 1:
        raise ValueError(f"keep {keep}: at least one checkpoint has to stay")
    kept = {e.directory for e in list_checkpoints(directory, history)[:keep]}
    current = max((start.generation for start in history), default=0)
    return [
        entry
        for entry in list_directories(directory)
        if entry.directory not in kept
        and entry.step not in protected_steps
        and (bool(kept) if is_complete(entry) else entry.generation < current)
    ]


def delete(entries: Sequence[CheckpointEntry]) -> list[Path]:
    """Delete checkpoints; returns the directories that are gone."""
    deleted = []
    for entry in entries:
        try:
            remove(entry.directory)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise
            continue  # a ghost wrote into it or deletes it as well; the next call finds what is left
        deleted.append(entry.directory)
    return deleted


def prune(
    directory: Path,
    keep: int,
    history: Sequence[GenerationStart] = (),
    *,
    protected_steps: Collection[int] = (),
) -> list[Path]:
    """Delete what ``expendable`` says; returns the deleted directories."""
    return delete(expendable(directory, keep, history, protected_steps=protected_steps))
