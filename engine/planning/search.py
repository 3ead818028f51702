"""Every layout that a run can take on some devices, and which of them is predicted to be fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.planning.config import RunConfig
from engine.planning.layout import Layout, illegal_reasons
from engine.planning.step_time import Hardware, step_time_s

KEEP_BONUS = 0.03
"""A layout that keeps TP and PP counts as this much faster: the cut stays the same, so less is moved and built."""


@dataclass(frozen=True)
class RankedLayout:
    """A layout with what it is predicted to cost. ``spares`` devices stay idle."""

    layout: Layout
    step_s: float
    spares: int
    tp_in_node: bool

    def __str__(self) -> str:
        idle = f", {self.spares} spare" if self.spares else ""
        return f"{self.layout} ({self.step_s:.3g} s a step predicted{idle})"


def legal_layouts(run: RunConfig, num_ranks: int, *, min_ranks: int = 1) -> list[Layout]:
    """All (tp, pp, dp) that ``run`` can take with ``min_ranks`` to ``num_ranks`` ranks, even stages, smallest first."""
    layouts = []
    for tp in range(1, min(num_ranks, run.model.num_attention_heads) + 1):
        if illegal_reasons(Layout(tp=tp), run.model, run.train):
            continue
        for pp in range(1, min(num_ranks // tp, run.model.num_layers) + 1):
            most = min(num_ranks // (tp * pp), run.train.num_microbatches)
            layouts += [Layout(tp=tp, pp=pp, dp=dp) for dp in range(-(-min_ranks // (tp * pp)), most + 1) if dp]
    return sorted(layouts, key=lambda layout: (layout.world_size, layout.tp, layout.pp))


def tp_groups_in_nodes(layout: Layout, devices_of_nodes: Sequence[int]) -> bool:
    """Whether each tensor-parallel group can sit within one node. ``devices_of_nodes``: free devices of each node."""
    return sum(devices // layout.tp for devices in devices_of_nodes) >= layout.pp * layout.dp


def fits_nodes(layout: Layout, devices_of_nodes: Sequence[int]) -> bool:
    """Whether the planner may choose ``layout``: a TP group spans nodes only where every node has a single device."""
    if layout.world_size > sum(devices_of_nodes):
        return False
    return tp_groups_in_nodes(layout, devices_of_nodes) or max(devices_of_nodes, default=0) == 1


def rank_layouts(
    run: RunConfig,
    devices_of_nodes: Sequence[int],
    hardware: Hardware,
    *,
    min_ranks: int = 1,
    max_ranks: int | None = None,
    current: Layout | None = None,
) -> list[RankedLayout]:
    """Every layout that is legal and fits the nodes, fastest first; an empty list when there is none.

    ``current``: the layout that the job has; keeping its TP and PP is worth ``KEEP_BONUS``. Between equals the one
    with fewer ranks comes first, then less TP, then less PP.
    """
    total = sum(devices_of_nodes)
    limit = total if max_ranks is None else min(total, max_ranks)
    ranked = []
    for layout in legal_layouts(run, limit, min_ranks=min_ranks):
        if not fits_nodes(layout, devices_of_nodes):
            continue
        in_node = layout.tp == 1 or tp_groups_in_nodes(layout, devices_of_nodes)
        seconds = step_time_s(run, layout, hardware, tp_in_node=in_node)
        ranked.append(RankedLayout(layout, seconds, limit - layout.world_size, in_node))

    def order(candidate: RankedLayout) -> tuple[float, int, int, int]:
        layout = candidate.layout
        keeps = current is not None and (layout.tp, layout.pp) == (current.tp, current.pp)
        return (candidate.step_s * (1 - KEEP_BONUS if keeps else 1), layout.world_size, layout.tp, layout.pp)

    return sorted(ranked, key=order)
