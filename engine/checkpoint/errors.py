"""What can go wrong with a checkpoint, as exceptions that every rank can be told of in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class CheckpointError(Exception):
    """Base: something failed while saving or loading, on this rank or on another one.

    ``elsewhere``: this rank did its part; it was told of the failure of another one.
    """

    elsewhere = False

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which ``from_json`` makes an equal exception on another rank."""
        return {"kind": "error", "text": str(self)}


class CheckpointDamaged(CheckpointError):
    """A file of a checkpoint is missing, cut off, altered or unreadable. ``file`` is its path, ``reason`` says how."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason

    def to_json(self) -> dict[str, Any]:
        """See ``CheckpointError.to_json``."""
        return {"kind": "damaged", "file": self.file, "reason": self.reason}


class CheckpointUnsupported(CheckpointDamaged):
    """Nothing is wrong with the checkpoint, but another version of this program has to read it."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is of another model. ``differences`` has one line for each tensor that does not fit."""

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__("the checkpoint is of another model: " + "; ".join(differences))
        self.differences = tuple(differences)

    def to_json(self) -> dict[str, Any]:
        """See ``CheckpointError.to_json``."""
        return {"kind": "mismatch", "differences": list(self.differences)}


class CheckpointSaveError(CheckpointError):
    """A save failed and left nothing behind that looks complete.

    ``file`` is the path that was being written; ``errno`` is the system's error number, None when it was none of the
    system's errors.
    """

    def __init__(self, file: str, reason: str, errno: int | None = None) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason
        self.errno = errno

    def to_json(self) -> dict[str, Any]:
        """See ``CheckpointError.to_json``."""
        return {"kind": "save", "file": self.file, "reason": self.reason, "errno": self.errno}


class CheckpointSuperseded(CheckpointError):
    """A save was given up before it was published: its generation is no longer the job's current one."""

    def to_json(self) -> dict[str, Any]:
        """See ``CheckpointError.to_json``."""
        return {"kind": "superseded", "text": str(self)}


def from_json(value: dict[str, Any]) -> CheckpointError:
    """Inverse of ``to_json``."""
    match value["kind"]:
        case "damaged":
            return CheckpointDamaged(value["file"], value["reason"])
        case "mismatch":
            return CheckpointMismatch(value["differences"])
        case "save":
            return CheckpointSaveError(value["file"], value["reason"], value["errno"])
        case "superseded":
            return CheckpointSuperseded(value["text"])
        case _:
            return CheckpointError(value["text"])
