"""A rank ended by itself though nobody asked it to: the first one is the culprit, its echoes are not."""

from __future__ import annotations

from controller.detect.faults import rank_faults
from controller.detect.incident import Finding, Incident, Suspicion
from controller.detect.patience import Patience
from controller.view import ClusterView, Job


def dead_rank(view: ClusterView, job: Job, now: float, patience: Patience) -> list[Finding]:
    """An incident that names the ranks with a cause of their own, earliest first.

    When there are only failed collectives, somebody else has died: wait ``patience.culprit_s`` for it to show, then
    name what is known. A generation whose ranks all ended well though the run is not complete is a fault as well.
    """
    if job.plan is None:
        return []
    faults = rank_faults(job.outcomes_now())
    if not faults:
        return _ended_early(job, now)
    culprits = [fault for fault in faults if not fault.is_echo]
    if not culprits:
        until = min(fault.seen_at for fault in faults) + patience.culprit_s
        if now < until:
            return [Suspicion(until, f"collective failed, culprit not seen yet: {faults[0].describe()}")]
    named = culprits or faults[:1]
    return [
        Incident(
            kind="dead_rank",
            job=job.id,
            generation=job.plan.generation,
            at=min(named[0].exit.at, named[0].seen_at),
            seen_at=named[0].seen_at if culprits else now,
            message="; ".join(fault.describe() for fault in named),
            nodes=tuple(dict.fromkeys(fault.node for fault in named)),
            ranks=tuple(fault.exit.rank for fault in named),
        )
    ]


def _ended_early(job: Job, now: float) -> list[Finding]:
    assert job.plan is not None
    outcomes = job.outcomes_now()
    if job.plan.stop or len(outcomes) < len(job.plan.placements):
        return []
    if any(seen.value.run_complete or not seen.value.all_gone for seen in outcomes.values()):
        return []
    seen_at = max(seen.at for seen in outcomes.values())
    ends = [end for seen in outcomes.values() for end in seen.value.exits]
    return [
        Incident(
            kind="dead_rank",
            job=job.id,
            generation=job.plan.generation,
            at=min([end.at for end in ends] + [seen_at]),
            seen_at=seen_at,
            message="every rank ended before the run was complete, though nobody asked for it",
            nodes=tuple(outcomes),
            ranks=tuple(sorted(end.rank for end in ends)),
        )
    ]
