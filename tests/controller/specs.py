"""Job specs, nodes and views as tests need them: small, valid, to be varied."""

from __future__ import annotations

import copy
from typing import Any

from controller.view import ClusterView, Job, OnDisk, Seen
from engine.planning.layout import Layout
from engine.planning.messages import Failure, GenerationStart, Meeting, Phase, RestorePoint
from everstep.protocol.messages import (
    CheckpointRecord,
    Device,
    Heartbeat,
    JobSpec,
    JobState,
    JobStatus,
    NodeOutcome,
    NodeRecord,
    Placement,
    Plan,
    RankExit,
    RankStatus,
)

SPEC: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "num_layers": 6,
        "hidden_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "ffn_hidden_size": 768,
        "vocab_size": 1000,
        "max_sequence_length": 128,
    },
    "data": {"path": "corpus/tokens"},
    "train": {"sequence_length": 64, "global_batch_size": 8, "train_steps": 1000},
    "checkpoint": {"directory": "runs", "save_interval": 10},
}


def spec_dict(**changes: Any) -> dict[str, Any]:
    """SPEC with some fields changed, named by path with double underscores: ``model__num_layers=5``."""
    spec = copy.deepcopy(SPEC)
    for path, value in changes.items():
        *parents, last = path.split("__")
        at = spec
        for parent in parents:
            at = at.setdefault(parent, {})
        if value is None:
            del at[last]
        else:
            at[last] = value
    return spec


def spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate(spec_dict(**changes))


def node(name: str, *, devices: int = 2, incarnation: str = "a", port: int = 1, meeting_port: int = 7000) -> NodeRecord:
    return NodeRecord(
        node=name,
        incarnation=incarnation,
        host="127.0.0.1",
        port=port,
        meeting_port=meeting_port,
        devices=tuple(Device(kind="cpu", index=i, memory_bytes=1 << 30, peak_flops=2e10) for i in range(devices)),
        pid=1,
        started_at=50.0,
    )


def beat(record: NodeRecord, *ranks: RankStatus, at: float = 100.0) -> Seen[Heartbeat]:
    return Seen(Heartbeat(node=record.node, incarnation=record.incarnation, sequence=1, at=at, ranks=ranks), at)


def rank_status(job: str, generation: int, rank: int, step: int, **more: Any) -> RankStatus:
    phase: Phase = more.pop("phase", "stepping")
    since = more.pop("since", 100.0)
    return RankStatus(
        job=job, generation=generation, rank=rank, device=0, pid=1, phase=phase, step=step, since=since, **more
    )


def nodes_of(names: str, **more: Any) -> dict[str, NodeRecord]:
    """``nodes_of("a b c")``."""
    return {name: node(name, **more) for name in names.split()}


def plan(
    layout: Layout,
    nodes: dict[str, NodeRecord],
    *,
    generation: int = 1,
    restore: RestorePoint | None = None,
    history: tuple[tuple[int, int], ...] = ((1, 0),),
    created_at: float = 90.0,
    **more: Any,
) -> Plan:
    """Ranks in order over the nodes, all devices used until the ranks are out."""
    placements, rank = [], 0
    for record in nodes.values():
        count = min(len(record.devices), layout.world_size - rank)
        if count:
            placements.append(
                Placement(
                    node=record.node,
                    incarnation=record.incarnation,
                    host=record.host,
                    ranks=tuple(range(rank, rank + count)),
                    devices=tuple(range(count)),
                )
            )
            rank += count
    assert rank == layout.world_size
    return Plan(
        job="j",
        generation=generation,
        layout=layout,
        placements=tuple(placements),
        meeting=Meeting(host="127.0.0.1", port=7000, prefix=f"j/g{generation}"),
        restore=restore,
        history=tuple(GenerationStart(generation=g, start_step=s) for g, s in history),
        run=spec().run_config(),
        run_directory="/runs/j",
        reason="",
        created_at=created_at,
        **more,
    )


def exit_of(rank: int, *, at: float = 100.0, category: str | None = None, **more: Any) -> RankExit:
    """How a rank ended; ``category`` gives it an exception record."""
    failure = None
    if category is not None:
        failure = Failure.model_validate(
            {
                "rank": rank,
                "generation": 1,
                "category": category,
                "error": more.pop("error", "RuntimeError"),
                "message": more.pop("message", "went wrong"),
                "traceback": "",
                "at": at,
                "file": more.pop("file", None),
            }
        )
        more.setdefault("exit_code", 10)
    return RankExit(rank=rank, pid=1, failure=failure, at=at, **more)


def outcome(
    record: NodeRecord,
    *exits: RankExit,
    generation: int = 1,
    seen_at: float = 100.0,
    all_gone: bool = False,
    **more: Any,
) -> Seen[NodeOutcome]:
    return Seen(
        NodeOutcome(
            job="j",
            generation=generation,
            node=record.node,
            incarnation=record.incarnation,
            exits=exits,
            all_gone=all_gone,
            **more,
        ),
        seen_at,
    )


def checkpoint(step: int, generation: int = 1) -> CheckpointRecord:
    directory = f"/runs/j/checkpoints/step-{step}.g{generation}"
    return CheckpointRecord(
        job="j", step=step, generation=generation, directory=directory, num_bytes=1, seconds=0.1, at=80.0
    )


def job(
    job_spec: JobSpec | None = None,
    *,
    of_plan: Plan | None = None,
    state: JobState = JobState.RUNNING,
    outcomes: tuple[Seen[NodeOutcome], ...] = (),
    checkpoints: tuple[CheckpointRecord, ...] = (),
    on_disk: OnDisk | None = OnDisk(),  # noqa: B008 (immutable): somebody has looked, and saw nothing
    **status: Any,
) -> Job:
    generation = of_plan.generation if of_plan else 0
    by_node = {seen.value.node: seen for seen in outcomes}
    return Job(
        id="j",
        spec=job_spec or spec(),
        status=JobStatus(
            job="j",
            name="tiny",
            state=state,
            generation=generation,
            submitted_at=10.0,
            changed_at=status.pop("changed_at", 20.0),
            **status,
        ),
        status_revision=5,
        plan=of_plan,
        plans={generation: of_plan} if of_plan else {},
        outcomes={generation: by_node} if of_plan else {},
        checkpoints={f"{c.step}.g{c.generation}": c for c in checkpoints},
        on_disk=on_disk,
    )


def view(nodes: dict[str, NodeRecord], *jobs: Job, ranks: tuple[RankStatus, ...] = (), **more: Any) -> ClusterView:
    """Every node has beaten; all rank statuses ride on the node that the job's plan places them on."""
    beats = {name: beat(record) for name, record in nodes.items()}
    for one in jobs:
        for placement in one.plan.placements if one.plan else ():
            if placement.node in nodes and nodes[placement.node].incarnation == placement.incarnation:
                mine = [status for status in ranks if status.rank in placement.ranks]
                beats[placement.node] = beat(nodes[placement.node], *mine)
    return ClusterView(revision=9, synced_at=0.0, nodes=nodes, beats=beats, jobs={one.id: one for one in jobs}, **more)
