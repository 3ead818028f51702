"""Which checkpoint the next generation starts from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from engine.planning.messages import GenerationStart, RestorePoint
from everstep.protocol.messages import CheckpointRecord


def counts(step: int, generation: int, history: Sequence[GenerationStart]) -> bool:
    """Whether what ``generation`` wrote at ``step`` belongs to the history that survived.

    A later generation began at its start step; what an older one wrote beyond it was done again, or is a ghost's.
    """
    return all(step <= later.start_step for later in history if later.generation > generation)


def newest_checkpoint(
    records: Iterable[CheckpointRecord], history: Sequence[GenerationStart], bad: Collection[str]
) -> CheckpointRecord | None:
    """The newest checkpoint that counts and is not known to be bad."""
    good = [
        record for record in records if record.directory not in bad and counts(record.step, record.generation, history)
    ]
    return max(good, key=lambda record: (record.step, record.generation), default=None)


def newest_restore_point(
    records: Iterable[CheckpointRecord], history: Sequence[GenerationStart], bad: Collection[str]
) -> RestorePoint | None:
    """Where the next generation starts; None means: from the seed."""
    newest = newest_checkpoint(records, history, bad)
    if newest is None:
        return None
    return RestorePoint(step=newest.step, generation=newest.generation, directory=newest.directory)
