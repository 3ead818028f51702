"""The job itself is at fault: a bad path, an import error. No node is to blame and trying again is no cure."""

from __future__ import annotations

from controller.detect.faults import rank_faults, shortened
from controller.detect.incident import Finding, Incident
from controller.detect.patience import Patience
from controller.view import ClusterView, Job


def user_error(view: ClusterView, job: Job, now: float, patience: Patience) -> list[Finding]:
    """The first rank whose exception record says that the user's input is wrong."""
    if job.plan is None:
        return []
    for fault in rank_faults(job.outcomes_now()):
        failure = fault.exit.failure
        if failure is not None and failure.category == "user":
            what = f"{failure.error}: {shortened(failure.message)}"
            return [
                Incident(
                    kind="user_error",
                    job=job.id,
                    generation=job.plan.generation,
                    at=min(fault.exit.at, fault.seen_at),
                    seen_at=fault.seen_at,
                    message=f"rank {failure.rank} after {fault.exit.step} steps: {what}",
                    ranks=(failure.rank,),
                )
            ]
    return []
