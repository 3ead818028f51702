"""A rank could not restore: the checkpoint is damaged. Not the rank's fault, and the next try needs another one."""

from __future__ import annotations

from pathlib import PurePosixPath

from controller.detect.faults import rank_faults, shortened
from controller.detect.incident import Finding, Incident
from controller.detect.patience import Patience
from controller.view import ClusterView, Job


def damaged_checkpoint(view: ClusterView, job: Job, now: float, patience: Patience) -> list[Finding]:
    """The checkpoint that the current generation was to restore, when a rank found it damaged.

    A checkpoint failure that names a file elsewhere (a save that failed, say) is left to ``dead_rank``.
    """
    if job.plan is None or job.plan.restore is None:
        return []
    directory = job.plan.restore.directory
    for fault in rank_faults(job.outcomes_now()):
        failure = fault.exit.failure
        if failure is None or failure.category != "checkpoint":
            continue
        if failure.file is not None and not PurePosixPath(failure.file).is_relative_to(directory):
            continue
        return [
            Incident(
                kind="damaged_checkpoint",
                job=job.id,
                generation=job.plan.generation,
                at=min(fault.exit.at, fault.seen_at),
                seen_at=fault.seen_at,
                message=f"checkpoint {directory} is damaged: {shortened(failure.message)}",
                checkpoint=directory,
            )
        ]
    return []
