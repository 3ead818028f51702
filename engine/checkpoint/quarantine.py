"""Setting bad checkpoints aside: nobody restores from them any more, and nobody deletes them.

A checkpoint that is set aside is renamed to ``bad-step-<step>.g<generation>``, a name that no reader takes and no
retention looks at; ``quarantine.json`` in it says why. Only the name counts, so the rename is the moment.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.agreement import agree
from engine.checkpoint.catalog import parse_name
from engine.checkpoint.errors import CheckpointDamaged, CheckpointUnsupported
from engine.checkpoint.manifest import MANIFEST, coverage_problems, read_manifest
from engine.checkpoint.shard import sync_directory
from engine.checkpoint.verify import examine_file
from engine.groups import CollectiveError, Group

NOTE = "quarantine.json"
_NAME = re.compile(r"bad-(step-\d{9,}\.g\d+)(?:-\d+)?")


@dataclass(frozen=True)
class SetAside:
    """A checkpoint that was set aside. ``reason`` is empty and ``at`` (seconds since 1970) 0 when its note is lost."""

    step: int
    generation: int
    directory: Path
    reason: str
    at: float


def set_aside(checkpoint: Path, reason: str, file: str | None = None) -> Path:
    """Rename the checkpoint in the directory ``checkpoint`` so that no reader takes it; returns its new place.

    ``file`` is the damaged one, when it is one. Raises ValueError when the directory has not a checkpoint's name or
    holds none that is complete, OSError when it cannot be renamed.
    """
    if parse_name(checkpoint.name) is None:
        raise ValueError(f"{checkpoint} is no checkpoint: its name is not step-<step>.g<generation>")
    if not (checkpoint / MANIFEST).is_file():
        raise ValueError(f"{checkpoint} is not there or not complete, so nobody restores from it anyway")
    note = {"reason": reason, "file": file, "at": time.time(), "name": checkpoint.name}
    (checkpoint / NOTE).write_text(json.dumps(note) + "\n")
    number, target = 1, checkpoint.with_name(f"bad-{checkpoint.name}")
    while target.exists():  # an earlier one of the same step and generation
        number += 1
        target = checkpoint.with_name(f"bad-{checkpoint.name}-{number}")
    checkpoint.rename(target)
    sync_directory(checkpoint.parent)
    return target


def release(checkpoint: Path) -> Path:
    """Undo ``set_aside``; returns the place where readers see the checkpoint again.

    Raises ValueError when ``checkpoint`` is not one that was set aside, or another one has its name by now; OSError
    when it is not there or cannot be renamed.
    """
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not set aside: its name is not bad-step-<step>.g<generation>")
    target = checkpoint.with_name(match[1])
    if target.exists():
        raise ValueError(f"{target} is there already")
    checkpoint.rename(target)
    (target / NOTE).unlink(missing_ok=True)
    sync_directory(checkpoint.parent)
    return target


def is_set_aside(checkpoint: Path) -> bool:
    """Whether the directory ``checkpoint`` has the name of one that was set aside."""
    return _NAME.fullmatch(checkpoint.name) is not None


def list_set_aside(directory: Path) -> list[SetAside]:
    """What was set aside in ``directory``, which need not exist, newest first."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        named = parse_name(match[1])
        assert named is not None
        try:
            note = json.loads((path / NOTE).read_text())
            reason, at = str(note["reason"]), float(note["at"])
        except (OSError, ValueError, TypeError, LookupError):
            reason, at = "", 0.0
        found.append(SetAside(*named, path, reason, at))
    return sorted(found, key=lambda one: (one.step, one.generation, one.directory.name), reverse=True)


def really_damaged(checkpoint: Path, file: str) -> bool:
    """Whether ``file``, the path that a CheckpointDamaged names, is damaged when this process looks at it again.

    False when its bytes are right (the fault was the other reader's, not the disk's), when they cannot be read (that
    may pass), when another version of the program wrote them, and when the checkpoint is not complete.
    """
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointDamaged as damage:
        return not isinstance(damage, CheckpointUnsupported) and not isinstance(damage.__cause__, OSError)
    name = os.path.relpath(file, checkpoint)
    if name == MANIFEST:
        return bool(coverage_problems(manifest))
    if name not in manifest.files:
        return False
    damages = [finding.damage for finding in examine_file(checkpoint, manifest, name)]
    return bool(damages) and not any(map(_may_pass, damages))


def _may_pass(damage: CheckpointDamaged) -> bool:
    """Whether ``damage`` is an error of the system's other than that the file is not there, or is no file."""
    cause = damage.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | IsADirectoryError)


def set_aside_after_load(
    damage: CheckpointDamaged,
    checkpoint: Path,
    group: Group,
    device: torch.device,
    still_current: Callable[[], bool] = lambda: True,
) -> CheckpointDamaged:
    """Set ``checkpoint`` aside after ``load_checkpoint`` raised ``damage``; every member of ``group`` calls it.

    No member reads any more then: they all agreed on the damage. Rank 0 looks again, and asks ``still_current``, so
    that neither a fault of one reader nor a ghost takes a good checkpoint away. Returns the damage to raise: its
    reason goes on with what became of the checkpoint. ``device`` is where the group's collectives want their tensors.
    """

    def attempt() -> str | None:
        if group.rank != 0 or not still_current() or not really_damaged(checkpoint, damage.file):
            return None
        try:
            return f"the checkpoint was set aside as {set_aside(checkpoint, damage.reason, damage.file).name}"
        except OSError as error:
            return f"the checkpoint could not be set aside: {error.strerror or error}"

    try:
        told = agree(group, device, attempt)[0]
    except CollectiveError:
        return damage  # a peer is gone, and so is the generation; the damage is what it has to report
    if told is None:
        return damage
    known = CheckpointDamaged(damage.file, f"{damage.reason}; {told}")
    known.elsewhere = damage.elsewhere
    return known
