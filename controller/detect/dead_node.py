"""A node that a plan relies on is gone: its agent refuses connections, came back as another, or its lease ended.

Silence alone is not death: while the lease lives nothing is done. When the lease has ended the agent's endpoint is
asked. An agent that still answers there has only lost etcd; its ranks train on, and it is given time to register anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.detect.incident import Finding, Incident, Suspicion
from controller.detect.patience import Patience
from controller.view import ClusterView, Job
from everstep.protocol.link import Verdict
from everstep.protocol.messages import Placement

ASK_AGAIN_S = 1.0


@dataclass(frozen=True)
class Death:
    """A node is dead: since when at the latest, since when the controller knows, and why it thinks so."""

    at: float
    seen_at: float
    why: str


def dead_node(view: ClusterView, job: Job, now: float, patience: Patience) -> list[Finding]:
    """One incident that names every dead node of the current generation, or suspicions."""
    if job.plan is None:
        return []
    outcomes = job.outcomes_now()
    deaths: list[tuple[Placement, Death]] = []
    suspicions: list[Finding] = []
    for placement in job.plan.placements:
        outcome = outcomes.get(placement.node)
        if outcome is not None and outcome.value.all_gone and all(end.complete for end in outcome.value.exits):
            continue  # its part of this generation ended well
        finding = death_of(view, placement, now, patience)
        if isinstance(finding, Suspicion):
            suspicions.append(finding)
        elif finding is not None:
            deaths.append((placement, finding))
    if not deaths:
        return suspicions
    return [
        Incident(
            kind="dead_node",
            job=job.id,
            generation=job.plan.generation,
            at=min(death.at for _, death in deaths),
            seen_at=max(death.seen_at for _, death in deaths),
            message="; ".join(f"node {placement.node}: {death.why}" for placement, death in deaths),
            nodes=tuple(placement.node for placement, _ in deaths),
            ranks=tuple(sorted(rank for placement, _ in deaths for rank in placement.ranks)),
        )
    ]


def death_of(view: ClusterView, placement: Placement, now: float, patience: Patience) -> Death | Suspicion | None:
    """Whether the life of the agent that ``placement`` relies on is over; None when nothing is wrong."""
    record = view.nodes.get(placement.node)
    verdict = view.verdict_of(placement.node, placement.incarnation)
    refused = verdict is not None and verdict.verdict is Verdict.REFUSED
    if verdict is not None and refused:
        return Death(verdict.at, verdict.at, "its agent refuses connections")
    if record is not None:
        if record.incarnation == placement.incarnation:
            return None
        return Death(min(record.started_at, now), now, "its agent was started anew")
    last_beat = view.beats.get(placement.node)
    died_at = now
    if last_beat is not None and last_beat.value.incarnation == placement.incarnation:
        died_at = last_beat.at
    departed = view.departed.get(placement.node)
    if departed is None or departed.value.incarnation != placement.incarnation:
        assert view.synced_at is not None
        until = view.synced_at + patience.listing_s
        if now < until:
            return Suspicion(until, f"node {placement.node} is not registered")
        return Death(died_at, now, "it is not registered")
    if verdict is None or verdict.at < departed.at:
        until = departed.at + patience.verdict_s
        if now < until:
            return Suspicion(until, f"the lease of node {placement.node} ended")
        return Death(died_at, now, "its lease ended and its agent was not reached")
    if verdict.verdict is Verdict.ALIVE:
        return Suspicion(now + ASK_AGAIN_S, f"node {placement.node} lost its lease but its agent answers")
    return Death(died_at, verdict.at, "its lease ended and its agent is silent")
