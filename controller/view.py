"""What the controller knows: one immutable ``ClusterView``, built by pure reducers from one watch on etcd.

Everything in it but ``verdicts`` (what the links to the agents say) and the times of arrival can be had again by
listing etcd. ``now`` is the controller's own wall clock; times inside messages are those of their writers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from pydantic import ValidationError

from engine.planning.messages import Message, RestorePoint
from everstep.protocol.keys import Keys
from everstep.protocol.link import Verdict
from everstep.protocol.messages import (
    CheckpointRecord,
    Event,
    Heartbeat,
    JobSpec,
    JobStatus,
    NodeOutcome,
    NodeRecord,
    Plan,
    RankStatus,
)
from everstep.protocol.store import Change, KeyValue, Snapshot

T = TypeVar("T", bound=Message)

FORGET_NODE_S = 3600.0
"""A node that left is remembered this long, for the story of incidents."""


@dataclass(frozen=True)
class Seen(Generic[T]):
    """A message and when this controller heard it."""

    value: T
    at: float


@dataclass(frozen=True)
class NodeVerdict:
    """What an agent's endpoint said when asked, about one life of that agent."""

    incarnation: str
    verdict: Verdict
    at: float


@dataclass(frozen=True)
class OnDisk:
    """Complete checkpoints that were ``found`` on the shared disk, and indexed directories known to be ``gone``."""

    found: tuple[RestorePoint, ...] = ()
    gone: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Job:
    """Everything stored about one job. ``on_disk``: None until somebody has looked, which a decision may ask for."""

    id: str
    spec: JobSpec | None = None
    status: JobStatus | None = None
    status_revision: int = 0
    plan: Plan | None = None
    plans: Mapping[int, Plan] = field(default_factory=dict)
    outcomes: Mapping[int, Mapping[str, Seen[NodeOutcome]]] = field(default_factory=dict)
    checkpoints: Mapping[str, CheckpointRecord] = field(default_factory=dict)
    events: Mapping[str, Event] = field(default_factory=dict)
    on_disk: OnDisk | None = None

    @property
    def active(self) -> bool:
        """Whether the job was submitted and has not ended."""
        return self.spec is not None and self.status is not None and not self.status.state.final

    def outcomes_now(self) -> Mapping[str, Seen[NodeOutcome]]:
        """Outcomes of the current generation, by node; those of another life of a node's agent left out."""
        if self.plan is None:
            return {}
        lives = {placement.node: placement.incarnation for placement in self.plan.placements}
        heard = self.outcomes.get(self.plan.generation, {})
        return {node: seen for node, seen in heard.items() if lives.get(node) == seen.value.incarnation}


@dataclass(frozen=True)
class ClusterView:
    """The cluster at one revision of etcd. Mappings are never changed in place."""

    revision: int = 0
    synced_at: float | None = None
    leader: KeyValue | None = None
    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)
    departed: Mapping[str, Seen[NodeRecord]] = field(default_factory=dict)
    beats: Mapping[str, Seen[Heartbeat]] = field(default_factory=dict)
    verdicts: Mapping[str, NodeVerdict] = field(default_factory=dict)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def verdict_of(self, node: str, incarnation: str) -> NodeVerdict | None:
        """The newest verdict on this life of the node's agent."""
        verdict = self.verdicts.get(node)
        return verdict if verdict is not None and verdict.incarnation == incarnation else None

    def healthy(self, node: str) -> bool:
        """Whether the node is registered, has beaten in this life and does not refuse connections."""
        record = self.nodes.get(node)
        if record is None:
            return False
        beat = self.beats.get(node)
        if beat is None or beat.value.incarnation != record.incarnation:
            return False
        verdict = self.verdict_of(node, record.incarnation)
        return verdict is None or verdict.verdict is not Verdict.REFUSED

    def ranks_of(self, job: Job, generation: int | None = None) -> list[RankStatus]:
        """Newest status of each rank of one generation (the current one by default), as heartbeats tell, by rank."""
        plan = job.plan if generation is None else job.plans.get(generation)
        if plan is None:
            return []
        found = []
        for placement in plan.placements:
            beat = self.beats.get(placement.node)
            if beat is not None and beat.value.incarnation == placement.incarnation:
                found += [r for r in beat.value.ranks if (r.job, r.generation) == (job.id, plan.generation)]
        return sorted(found, key=lambda rank: rank.rank)

    def step_of(self, job: Job) -> int:
        """Completed steps of the job, as far as is known: from heartbeats, ends of ranks, or where the plan began."""
        if job.plan is None:
            return 0
        start = job.plan.restore.step if job.plan.restore else 0
        return max(start, self.progress(job, job.plan.generation))

    def progress(self, job: Job, generation: int) -> int:
        """Most completed steps that any rank of ``generation`` told of; 0 when none did."""
        beaten = [rank.step for rank in self.ranks_of(job, generation)]
        ended = [e.step for seen in job.outcomes.get(generation, {}).values() for e in seen.value.exits]
        return max(beaten + ended, default=0)


def on_snapshot(old: ClusterView, snapshot: Snapshot, keys: Keys, now: float) -> ClusterView:
    """The view after a listing of everything. Nodes that were known and are not listed have departed ``now``."""
    fresh = ClusterView(
        synced_at=old.synced_at or now, verdicts=old.verdicts, beats=dict(old.beats), departed=dict(old.departed)
    )
    previous = old.jobs
    for item in snapshot.items:
        fresh = _apply(fresh, item.key, item, keys, now, previous)
    departed = dict(fresh.departed)
    for name, record in old.nodes.items():
        if name not in fresh.nodes:
            departed[name] = Seen(record, now)
    return replace(fresh, departed=departed, revision=snapshot.revision)


def on_change(view: ClusterView, change: Change, keys: Keys, now: float) -> ClusterView:
    """The view after one change."""
    return replace(_apply(view, change.key, change.item, keys, now, view.jobs), revision=change.revision)


def on_verdict(view: ClusterView, node: str, verdict: NodeVerdict) -> ClusterView:
    """The view after an agent's endpoint was asked."""
    return replace(view, verdicts={**view.verdicts, node: verdict})


def _apply(
    view: ClusterView, key: str, item: KeyValue | None, keys: Keys, now: float, previous: Mapping[str, Job]
) -> ClusterView:
    """One key. A value that cannot be read is noted and otherwise treated as if it were not there."""
    if key in view.unreadable:
        view = replace(view, unreadable={k: v for k, v in view.unreadable.items() if k != key})
    try:
        if key == keys.leader:
            return replace(view, leader=item)
        if key.startswith(keys.nodes):
            return _on_node(view, key.removeprefix(keys.nodes), item, now)
        if key.startswith(keys.beats):
            return _on_beat(view, key.removeprefix(keys.beats), item, now)
        if key.startswith(keys.jobs):
            job_id, _, rest = key.removeprefix(keys.jobs).partition("/")
            job = _on_job(view.jobs.get(job_id) or Job(job_id), rest, item, now, previous.get(job_id))
            return replace(view, jobs={**view.jobs, job_id: job})
    except (ValidationError, ValueError) as error:
        return replace(view, unreadable={**view.unreadable, key: str(error)})
    return view


def _on_node(view: ClusterView, name: str, item: KeyValue | None, now: float) -> ClusterView:
    nodes, departed = dict(view.nodes), dict(view.departed)
    if item is not None:
        nodes[name] = NodeRecord.model_validate_json(item.value)
        departed.pop(name, None)
        return replace(view, nodes=nodes, departed=departed)
    record = nodes.pop(name, None)
    if record is None:
        return view
    forgotten = {node for node, seen in departed.items() if now - seen.at > FORGET_NODE_S}
    departed = {node: seen for node, seen in departed.items() if node not in forgotten}
    departed[name] = Seen(record, now)
    beats = {node: beat for node, beat in view.beats.items() if node not in forgotten}
    verdicts = {node: verdict for node, verdict in view.verdicts.items() if node not in forgotten}
    return replace(view, nodes=nodes, departed=departed, beats=beats, verdicts=verdicts)


def _on_beat(view: ClusterView, name: str, item: KeyValue | None, now: float) -> ClusterView:
    if item is None:  # the last beat of a node that left tells how far its ranks had come
        return view
    return replace(view, beats={**view.beats, name: Seen(Heartbeat.model_validate_json(item.value), now)})


def _on_job(job: Job, rest: str, item: KeyValue | None, now: float, previous: Job | None) -> Job:
    value = item.value if item is not None else None
    kind, _, tail = rest.partition("/")
    match kind:
        case "spec":
            return replace(job, spec=JobSpec.model_validate_json(value) if value else None)
        case "status":
            status = JobStatus.model_validate_json(value) if value else None
            return replace(job, status=status, status_revision=item.mod_revision if item else 0)
        case "plan":
            return replace(job, plan=Plan.model_validate_json(value) if value else None)
        case "plans":
            return replace(job, plans=_with(job.plans, int(tail), Plan.model_validate_json(value) if value else None))
        case "outcomes":
            generation, _, node = tail.partition("/")
            outcome = None
            if value:
                outcome = Seen(NodeOutcome.model_validate_json(value), now)
                known = previous.outcomes.get(int(generation), {}).get(node) if previous else None
                if known is not None and known.value == outcome.value:
                    outcome = known  # a listing tells nothing new; keep when it was first heard
            of_nodes = _with(job.outcomes.get(int(generation), {}), node, outcome)
            return replace(job, outcomes={**job.outcomes, int(generation): of_nodes})
        case "checkpoints":
            record = CheckpointRecord.model_validate_json(value) if value else None
            return replace(job, checkpoints=_with(job.checkpoints, tail, record))
        case "events":
            return replace(job, events=_with(job.events, tail, Event.model_validate_json(value) if value else None))
        case _:
            return job


K = TypeVar("K")
V = TypeVar("V")


def _with(mapping: Mapping[K, V], key: K, value: V | None) -> Mapping[K, V]:
    """A copy with ``key`` set, or without it when ``value`` is None."""
    copy = {k: v for k, v in mapping.items() if k != key}
    if value is not None:
        copy[key] = value
    return copy
