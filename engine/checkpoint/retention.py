"""Deleting old checkpoints by hand: what can go when only the disk is asked, and never the last good one.

The service prunes with the job's history at hand. Here the history is derived from the checkpoints themselves, and
because nobody may be there to notice a damaged one, what stays is read and checked before anything else is deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.catalog import CheckpointEntry, expendable, is_complete, list_checkpoints, list_directories
from engine.checkpoint.fence import newest_claim
from engine.checkpoint.verify import Finding, examine
from engine.planning.messages import GenerationStart


@dataclass(frozen=True)
class PrunePlan:
    """What pruning would do. ``damaged``: checkpoints that stay and do not count, with what is wrong with them."""

    kept: tuple[CheckpointEntry, ...]
    damaged: tuple[tuple[CheckpointEntry, tuple[Finding, ...]], ...]
    expendable: tuple[CheckpointEntry, ...]
    note: str | None = None


def history_on_disk(directory: Path) -> tuple[GenerationStart, ...]:
    """What the checkpoints tell about when generations started, ascending.

    A generation that saved after step s started before it, so s is an upper bound of its start: whatever this history
    rules out, the true one does too. A generation that claimed the directory and saved nothing yet may have started
    anywhere and rules out nothing.
    """
    complete = [entry for entry in list_directories(directory) if is_complete(entry)]
    starts: dict[int, int] = {}
    for entry in complete:
        starts[entry.generation] = min(entry.step, starts.get(entry.generation, entry.step))
    claimed = newest_claim(directory)
    if claimed > max(starts, default=0):
        starts[claimed] = max((entry.step for entry in complete), default=0)
    return tuple(GenerationStart(generation=g, start_step=s) for g, s in sorted(starts.items()))


def plan_prune(directory: Path, keep: int, on_bytes: Callable[[int], None] = lambda num_bytes: None) -> PrunePlan:
    """What can go so that the ``keep`` newest good checkpoints stay.

    Checks every byte of complete ones, newest first, until ``keep`` good ones are found; ``on_bytes`` hears of every
    read. A damaged one before that stays too, and when there is no good one at all, every complete one stays. So does
    every complete one while the newest generation has not saved yet: what it started from is not known here. Raises
    ValueError when ``keep`` is below 1.
    """
    history = history_on_disk(directory)
    counted = list_checkpoints(directory, history)
    candidates = expendable(directory, keep, history)
    unfinished = tuple(entry for entry in candidates if not is_complete(entry))
    if len(unfinished) == len(candidates):
        return PrunePlan(tuple(counted), (), unfinished)
    claimed = newest_claim(directory)
    if claimed > max((entry.generation for entry in counted), default=0):
        note = f"generation {claimed} has begun and not saved yet; what it started from is not known here, so all stay"
        return PrunePlan(tuple(counted), (), unfinished, note)

    good: list[CheckpointEntry] = []
    damaged: list[tuple[CheckpointEntry, tuple[Finding, ...]]] = []
    for entry in counted:
        findings = tuple(examine(entry.directory, on_bytes))
        if findings:
            damaged.append((entry, findings))
        else:
            good.append(entry)
        if len(good) == keep:
            break
    if not good:
        return PrunePlan((), tuple(damaged), unfinished, "no checkpoint is good, so all complete ones stay")
    # From the lists made before the check: a running job may have saved and pruned since.
    staying = {entry.directory for entry in counted[: len(good) + len(damaged)]}
    return PrunePlan(tuple(good), tuple(damaged), tuple(e for e in candidates if e.directory not in staying))
