"""Which checkpoint the next generation starts from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from controller.view import Job
from engine.planning.messages import GenerationStart, RestorePoint
from everstep.protocol.messages import CheckpointRecord


def counts(step: int, generation: int, history: Sequence[GenerationStart]) -> bool:
    """Whether what ``generation`` wrote at ``step`` belongs to the history that survived.

    A later generation began at its start step; what an older one wrote beyond it was done again, or is a ghost's.
    """
    return all(step <= later.start_step for later in history if later.generation > generation)


Checkpoint = TypeVar("Checkpoint", CheckpointRecord, RestorePoint)


def newest_checkpoint(
    records: Iterable[Checkpoint], history: Sequence[GenerationStart], bad: Collection[str]
) -> Checkpoint | None:
    """The newest checkpoint that counts and is not known to be bad."""
    good = [
        record for record in records if record.directory not in bad and counts(record.step, record.generation, history)
    ]
    return max(good, key=lambda record: (record.step, record.generation), default=None)


def known_checkpoints(job: Job) -> list[RestorePoint]:
    """What the index names, less what is known to be gone, and what was found on the disk besides."""
    indexed = [
        RestorePoint(step=r.step, generation=r.generation, directory=r.directory) for r in job.checkpoints.values()
    ]
    if job.on_disk is None:
        return indexed
    points = {point.directory: point for point in (*indexed, *job.on_disk.found)}
    return [point for directory, point in points.items() if directory not in job.on_disk.gone]


def newest_restore_point(job: Job, bad: Collection[str]) -> RestorePoint | None:
    """Where the job's next generation starts; None means: from the seed."""
    return newest_checkpoint(known_checkpoints(job), job.plan.history if job.plan else (), bad)
