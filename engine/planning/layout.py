"""Layouts: which rank holds which part of the model, and which layouts a run can take.

Order of ranks, fastest first: tp, cp, dp, pp. Tensor-parallel peers are therefore neighbours and sit in one node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from engine.planning.config import ModelConfig, RunConfig, Settings, TrainConfig

Degree = Annotated[int, Field(ge=1, strict=True)]


@dataclass(frozen=True)
class Coordinates:
    """The place of one rank in a layout."""

    tp: int
    cp: int
    dp: int
    pp: int


class Layout(Settings):
    """Degrees of parallelism. ``stage_layers`` gives the layers of each pipeline stage when they are not to be even.

    ``cp``, ``ep`` and ``vpp`` are part of the vocabulary; values above 1 are refused by ``illegal_reasons`` until the
    engine can run them.
    """

    tp: Degree = 1
    pp: Degree = 1
    dp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1
    vpp: Degree = 1
    stage_layers: tuple[int, ...] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stage_layers is not None:
            if len(self.stage_layers) != self.pp:
                raise ValueError(f"stage_layers has {len(self.stage_layers)} entries for pp {self.pp}")
            if min(self.stage_layers) < 1:
                raise ValueError("stage_layers: every stage needs at least one layer")
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """The place of ``rank``; raises ValueError when the layout has no such rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a layout of {self.world_size} ranks")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank_of(self, at: Coordinates) -> int:
        """Inverse of ``coordinates``."""
        return at.tp + self.tp * (at.cp + self.cp * (at.dp + self.dp * at.pp))

    def layers_of_stage(self, stage: int, num_layers: int) -> range:
        """The global layer numbers of one pipeline stage.

        Without ``stage_layers`` the remainder goes to the earliest stages but the last stage, which also has the
        language-model head, is never longer than another.
        """
        counts = self.stage_layers or tuple(
            num_layers // self.pp + (1 if s < num_layers % self.pp else 0) for s in range(self.pp)
        )
        start = sum(counts[:stage])
        return range(start, start + counts[stage])

    def microbatches_of_replica(self, dp_rank: int, num_microbatches: int) -> range:
        """The micro-batches of the global batch that replica ``dp_rank`` runs: contiguous, counts differ by at most 1.

        The union over replicas is the whole batch whatever DP is, so the global batch never changes.
        """
        each, extra = divmod(num_microbatches, self.dp)
        start = dp_rank * each + min(dp_rank, extra)
        return range(start, start + each + (1 if dp_rank < extra else 0))

    def __str__(self) -> str:
        return f"TP{self.tp}·PP{self.pp}·DP{self.dp}"


def illegal_reasons(
    layout: Layout, model: ModelConfig, train: TrainConfig, *, num_ranks: int | None = None
) -> list[str]:
    """Why this run cannot take this layout; an empty list means that it can.

    The one place for legality: API, planner and engine all ask here. ``num_ranks`` is the number of ranks there are,
    if that is to be checked too.
    """
    reasons = []
    for name, degree in (("cp", layout.cp), ("ep", layout.ep), ("vpp", layout.vpp)):
        if degree != 1:
            reasons.append(f"layout.{name} {degree}: only 1 is supported")
    if num_ranks is not None and layout.world_size > num_ranks:
        reasons.append(f"layout needs {layout.world_size} ranks, there are {num_ranks}")
    for field, size in (
        ("num_attention_heads", model.num_attention_heads),
        ("num_key_value_heads", model.kv_heads),
        ("ffn_hidden_size", model.ffn_hidden_size),
    ):
        if size % layout.tp:
            reasons.append(f"model.{field} {size} is not divisible by layout.tp {layout.tp}")
    if layout.pp > model.num_layers:
        reasons.append(f"layout.pp {layout.pp} is more than model.num_layers {model.num_layers}")
    if layout.stage_layers is not None and sum(layout.stage_layers) != model.num_layers:
        reasons.append(f"layout.stage_layers sum to {sum(layout.stage_layers)}, model.num_layers is {model.num_layers}")
    if layout.dp > train.num_microbatches:
        reasons.append(
            f"layout.dp {layout.dp} is more than the {train.num_microbatches} micro-batches of a step "
            f"(global_batch_size {train.global_batch_size} / micro_batch_size {train.micro_batch_size})"
        )
    return reasons


def check_legal(layout: Layout, run: RunConfig, *, num_ranks: int | None = None) -> None:
    """Raise ValueError with every reason when ``run`` cannot take ``layout``."""
    reasons = illegal_reasons(layout, run.model, run.train, num_ranks=num_ranks)
    if reasons:
        raise ValueError("; ".join(reasons))
