"""Who gets which devices: the queue, the devices that a job may use, the layout for them, the place of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controller.view import ClusterView, Job
from engine.planning.layout import Layout
from engine.planning.search import RankedLayout, fits_nodes, rank_layouts, tp_groups_in_nodes
from engine.planning.step_time import Hardware, cpu_hardware, gpu_hardware, step_time_s
from everstep.protocol.messages import Device, NodeRecord, Placement


@dataclass(frozen=True)
class FreeNode:
    """A healthy node and those of its devices that a job may use."""

    record: NodeRecord
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Choice:
    """The layout for a job on some devices, ``why``, and why devices stay ``idle``; the best few ``considered``."""

    best: RankedLayout
    why: str
    idle: str
    considered: tuple[RankedLayout, ...]


def devices_in_use(view: ClusterView, apart_from: str) -> set[tuple[str, int]]:
    """(node, device) held by other jobs: by their plans, and by older ranks of theirs until those are proven gone."""
    used = set()
    for job in view.jobs.values():
        if job.id == apart_from or job.plan is None or job.status is None:
            continue
        used |= _still_ending(view, job)
        outcomes = job.outcomes_now()
        for placement in job.plan.placements:
            outcome = outcomes.get(placement.node)
            gone = outcome is not None and outcome.value.all_gone
            record = view.nodes.get(placement.node)
            another_life = record is None or record.incarnation != placement.incarnation
            if job.status.state.final and (gone or another_life):
                continue
            used |= {(placement.node, device) for device in placement.devices}
    return used


def _still_ending(view: ClusterView, job: Job) -> set[tuple[str, int]]:
    """(node, device) of ranks that an older generation of ``job`` started and whose agent has not seen the end of."""
    current = job.plan.generation if job.plan else 0
    return {
        (placement.node, device)
        for generation, outcomes in job.outcomes.items()
        if generation != current and (plan := job.plans.get(generation)) is not None
        for placement in plan.placements
        if (seen := outcomes.get(placement.node)) is not None
        and not seen.value.all_gone
        and (record := view.nodes.get(placement.node)) is not None
        and record.incarnation == placement.incarnation == seen.value.incarnation
        for device in placement.devices
    }


def free_nodes(view: ClusterView, job: Job) -> list[FreeNode]:
    """Healthy nodes with devices for ``job``, those it is on first, then by name; its own devices count as free.

    Ranks of one job run on one kind of device: the kind with the most computing power in all.
    """
    used = devices_in_use(view, job.id)
    free: dict[str, list[FreeNode]] = {}
    power: dict[str, float] = {}
    for name in sorted(view.nodes):
        if not view.healthy(name):
            continue
        record = view.nodes[name]
        for kind in ("cuda", "cpu"):
            devices = tuple(d for d in record.devices if d.kind == kind and (name, d.index) not in used)
            if devices:
                free.setdefault(kind, []).append(FreeNode(record, devices))
                power[kind] = power.get(kind, 0.0) + sum(device.peak_flops for device in devices)
    if not free:
        return []
    kind = max(free, key=lambda kind: (power[kind], kind))
    before = [placement.node for placement in job.plan.placements] if job.plan else []
    order = {name: place for place, name in enumerate(before)}
    return sorted(free[kind], key=lambda node: (order.get(node.record.node, len(order)), node.record.node))


def hardware_of(free: Sequence[FreeNode]) -> Hardware:
    """What the planner assumes of these devices: the slowest sets the pace."""
    devices = [device for node in free for device in node.devices]
    peak = min((device.peak_flops for device in devices if device.peak_flops > 0), default=0.0)
    if peak == 0.0:
        return Hardware()
    return gpu_hardware(peak) if devices[0].kind == "cuda" else cpu_hardware(peak)


def choose_layout(
    job: Job, free: Sequence[FreeNode], *, keep: Layout | None, fixed_only: bool = False
) -> Choice | None:
    """The layout for ``job`` on the free devices; None when there is none with at least ``min_ranks``.

    A layout that the user fixed is taken when it fits. When it does not, ``fixed_only`` says that the job rather waits
    (it never ran); else the planner chooses. ``keep``: the present layout, preferred between near equals.
    """
    assert job.spec is not None
    spec, run = job.spec, job.spec.run_config()
    sizes = [len(node.devices) for node in free]
    total = sum(sizes)
    hardware = hardware_of(free)
    ranked = rank_layouts(
        run, sizes, hardware, min_ranks=spec.resources.min_ranks, max_ranks=spec.resources.ranks, current=keep
    )
    if isinstance(spec.layout, Layout):
        if spec.layout.world_size <= total:
            in_node = tp_groups_in_nodes(spec.layout, sizes)
            seconds = step_time_s(run, spec.layout, hardware, tp_in_node=in_node)
            best = RankedLayout(spec.layout, seconds, total - spec.layout.world_size, in_node)
            idle = _idle(best, "the layout is fixed")
            return Choice(best, "the layout that the job asks for", idle, (best, *ranked[:4]))
        if fixed_only:
            return None
    if not ranked:
        return None
    best = ranked[0]
    best = RankedLayout(best.layout, best.step_s, total - best.layout.world_size, best.tp_in_node)
    why = f"fastest predicted of {len(ranked)} legal layouts on {total} device{'s' if total != 1 else ''}"
    limited = best.layout.world_size == spec.resources.ranks
    because = f"the job wants {spec.resources.ranks}" if limited else "no legal layout with more ranks is faster"
    return Choice(best, why, _idle(best, because), tuple(ranked[:5]))


def _idle(best: RankedLayout, because: str) -> str:
    if best.spares == 0:
        return ""
    return f"; {best.spares} idle as spare{'s' if best.spares != 1 else ''}: {because}"


def place(layout: Layout, free: Sequence[FreeNode]) -> tuple[Placement, ...]:
    """Ranks to devices in order, each tensor-parallel group within one node where the nodes allow it."""
    sizes = [len(node.devices) for node in free]
    assert layout.world_size <= sum(sizes)
    group = layout.tp if tp_groups_in_nodes(layout, sizes) else 1
    assert group == layout.tp or not fits_nodes(layout, sizes) or max(sizes) == 1
    placements = []
    rank = 0
    for node in free:
        count = min(len(node.devices) // group * group, layout.world_size - rank)
        if count:
            placements.append(
                Placement(
                    node=node.record.node,
                    incarnation=node.record.incarnation,
                    host=node.record.host,
                    ranks=tuple(range(rank, rank + count)),
                    devices=tuple(device.index for device in node.devices[:count]),
                )
            )
            rank += count
    assert rank == layout.world_size
    return tuple(placements)


def queue(view: ClusterView) -> list[Job]:
    """Jobs that have never been placed, first come first; those that the controller fails on hold up nobody."""
    waiting = [job for job in view.jobs.values() if job.active and job.plan is None]
    sound = [job for job in waiting if job.status is not None and not job.status.trouble]
    return sorted(sound, key=_turn)


def _turn(job: Job) -> tuple[float, str]:
    return (job.status.submitted_at if job.status is not None else 0.0, job.id)


def blocked_by(view: ClusterView, job: Job) -> Job | None:
    """An earlier job of the queue that could run if the devices in use were free: ``job`` must not overtake it."""
    for earlier in queue(view):
        if _turn(earlier) >= _turn(job):
            return None
        if could_ever_fit(view, earlier):
            return earlier
    return None


def could_ever_fit(view: ClusterView, job: Job) -> bool:
    """Whether the healthy nodes, all free, would do for ``job``."""
    alone = ClusterView(nodes=view.nodes, beats=view.beats, verdicts=view.verdicts)
    return choose_layout(job, free_nodes(alone, job), keep=None, fixed_only=True) is not None
