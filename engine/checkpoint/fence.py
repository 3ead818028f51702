"""Fencing where it counts: in the directory of the checkpoints itself, without asking anybody.

A generation claims the directory, when its ranks have met, with an empty file ``generation-<number>``. A ghost (ranks
of an older generation that nobody could end, on a node that is cut off from the rest, say) finds the newer claim and
then neither publishes nor deletes anything. Looking and acting are two steps, so a ghost may just slip through once;
what it publishes then does not count, by the rule in ``catalog.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.checkpoint.errors import CheckpointSuperseded
from engine.checkpoint.shard import sync_directory

_NAME = re.compile(r"generation-(\d+)")


def newest_claim(directory: Path) -> int:
    """The newest generation that claimed ``directory``, which need not exist; 0 when there is none."""
    return max(_claims(directory), default=0)


def claim(directory: Path, generation: int) -> None:
    """Shut every older generation out of ``directory``, durably; makes it when it is not there.

    Raises CheckpointSuperseded when a newer generation was here before, OSError when the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    claims = _claims(directory)
    newest = max(claims, default=0)
    if newest > generation:
        raise CheckpointSuperseded(f"{directory}: generation {newest} was here before generation {generation}")
    (directory / f"generation-{generation}").touch()
    sync_directory(directory)
    for number in claims:
        if number < generation:
            (directory / f"generation-{number}").unlink(missing_ok=True)


def _claims(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    return [int(match[1]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
