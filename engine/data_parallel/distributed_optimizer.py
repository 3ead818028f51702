"""AdamW whose state is shared out over the data-parallel group (ZeRO-1, Rajbhandari et al. 2020, arXiv:1910.02054).

Each rank holds fp32 master weights and both moments for its shard of every bucket, updates them with the summed
gradients, and the replicas gather the updated parameters. In an fp32 model the shard of the parameter buffer itself is
the master. One small collective over all ranks carries the gradient norm and whatever the loop wants to be summed.

Frozen parameters have master weights and nothing else. A parameter that the model never used in a step has the gradient
zero, as with ``zero_grad(set_to_none=False)`` in torch: its moments begin at zero, and weight decay applies to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.pieces import Piece, flat_pieces
from engine.data_parallel.adamw import adamw_
from engine.data_parallel.buckets import Bucket, ParameterBuckets, Slot
from engine.data_parallel.loss_scaler import LossScaler
from engine.groups import Groups
from engine.parameters import Segment
from engine.planning.config import TrainConfig

_NORM_CHUNK = 1 << 22
"""Elements that are squared in float64 at a time: bounds the memory that takes to 32 MiB."""


@dataclass(frozen=True, eq=False)
class _Shard:
    """This rank's part of one bucket: all tensors [n] fp32; ranges count from the start of the shard.

    ``counted``: elements that this rank, and no other, adds to the global norm and saves. In a frozen bucket the
    gradient and the moments are empty, and so is ``counted``.
    """

    bucket: Bucket
    master: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    decayed: tuple[slice, ...]
    counted: tuple[slice, ...]


class DistributedOptimizer:
    """ZeRO-1 AdamW over ``buckets``, with global-norm clipping and, in fp16, loss scaling; settings from ``train``.

    ``num_updates`` counts the updates made, which is the number that AdamW corrects its moments by. It is the number of
    steps but for those that fp16 skipped. ``scaler`` is None unless the run is fp16.
    """

    def __init__(self, buckets: ParameterBuckets, groups: Groups, train: TrainConfig) -> None:
        self._buckets = buckets
        self._groups = groups
        self._train = train
        self._shards = [self._shard(bucket) for bucket in buckets.buckets]
        self._trained = [shard for shard in self._shards if not shard.bucket.frozen]
        self.num_updates = 0
        self.scaler = LossScaler.initial(train.scaling) if train.scaling is not None else None

    @property
    def loss_scale(self) -> float:
        """What the loss has to be multiplied by before the next backward pass."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @torch.no_grad()
    def step(self, lr: float, extras: Tensor | None = None) -> tuple[float, Tensor]:
        """Update the parameters from the gradients that ``ParameterBuckets.finish`` left, then zero the gradients.

        ``extras`` [k] is summed over all ranks in the same collective. Returns the global gradient norm before clipping
        and the summed extras (float64, on the CPU).

        When the norm is not finite, weights and moments stay untouched on every rank, which all see the same norm. With
        loss scaling the update is skipped, the scale shrinks, and the norm that is returned tells it. Without, and at
        the smallest scale, FloatingPointError is raised.
        """
        sums = self._squared_norm()
        if extras is not None:
            sums = torch.cat([sums, extras.to(sums)])
        self._groups.world.all_reduce(sums).wait()
        sums = sums.cpu()
        scale = self.loss_scale
        norm = math.sqrt(sums[0].item()) / scale
        overflow = not math.isfinite(norm)
        if self.scaler is not None:
            self.scaler = self.scaler.after(overflow=overflow)
        elif overflow:
            raise FloatingPointError(f"the gradient norm of update {self.num_updates + 1} is {norm}")
        if overflow:
            self._buckets.zero_gradients()
            return norm, sums[1:]
        self.num_updates += 1
        clip = self._train.clip_grad
        factor = (clip / (norm + 1e-6) if norm > clip > 0 else 1.0) / scale
        for shard in self._trained:
            if factor != 1.0:
                shard.gradient.mul_(factor)
            adamw_(
                shard.master,
                shard.gradient,
                shard.exp_avg,
                shard.exp_avg_sq,
                train=self._train,
                lr=lr,
                step=self.num_updates,
                decayed=shard.decayed,
            )
        self._refresh_parameters(self._trained)
        return norm, sums[1:]

    def pieces(self) -> list[Piece]:
        """This rank's weights and moments as boxes of the global tensors; loading writes into their ``data``.

        Weights are the fp32 masters whatever the precision of the model. Frozen parameters have no moments.
        """
        return [piece for shard in self._shards for slot in shard.bucket.slots for piece in self._pieces(shard, slot)]

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the pieces, as JSON; the same on every rank."""
        state: dict[str, Any] = {"num_updates": self.num_updates}
        if self.scaler is not None:
            state["loss_scaler"] = self.scaler.state()
        return state

    @torch.no_grad()
    def initialise(self, whole_of: Callable[[Segment], Tensor]) -> None:
        """Begin at step 0 with the weights that ``whole_of`` gives: a segment's whole global tensor, fp32 on the CPU.

        They go into the fp32 masters as they are, so a bf16 run starts from the very state of an fp32 run. At no time
        is more than one global tensor in memory.
        """
        for shard in self._shards:
            for slot in shard.bucket.slots:
                pieces = list(self._pieces(shard, slot))
                for segment in slot.spec.segments:
                    mine = [piece for piece in pieces if piece.name == f"weight/{segment.name}"]
                    whole = whole_of(segment) if mine else None
                    for piece in mine:
                        assert whole is not None
                        piece.data.copy_(whole[piece.box.slices])
        self.after_load(0)

    @torch.no_grad()
    def after_load(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Go on after ``step`` steps: make the parameters of all replicas those of the pieces just written.

        ``state`` is what ``state`` returned when they were saved; without it every step was an update. A run that is
        fp16 only now begins with the initial scale, one that is fp16 no longer has none.
        """
        state = state or {}
        self.num_updates = int(state.get("num_updates", step))
        scaling = self._train.scaling
        if scaling is not None:
            scaler = state.get("loss_scaler")
            self.scaler = LossScaler.restored(scaling, scaler) if scaler else LossScaler.initial(scaling)
        self._refresh_parameters(self._shards)

    def _refresh_parameters(self, shards: list[_Shard]) -> None:
        for shard in shards:
            mine = shard.bucket.parameters[shard.bucket.shard]
            if mine.data_ptr() != shard.master.data_ptr():
                mine.copy_(shard.master)
        gathering = self._buckets.gather_parameters([shard.bucket for shard in shards])
        self._buckets.zero_gradients()
        for pending in gathering:
            pending.wait()

    def _shard(self, bucket: Bucket) -> _Shard:
        mine = bucket.parameters[bucket.shard].detach()
        gradient = bucket.gradients[slice(0) if bucket.frozen else bucket.shard]
        return _Shard(
            bucket=bucket,
            master=mine if mine.dtype == torch.float32 else mine.float(),
            gradient=gradient,
            exp_avg=torch.zeros_like(gradient),
            exp_avg_sq=torch.zeros_like(gradient),
            decayed=_ranges(bucket, lambda slot: slot.spec.decay),
            counted=() if bucket.frozen else _ranges(bucket, self._is_counted),
        )

    def _is_counted(self, slot: Slot) -> bool:
        """Whether norms and saves take this rank's copy of the parameter."""
        return slot.spec.owned and not (slot.spec.tp_replicated and self._groups.at.tp > 0)

    def _squared_norm(self) -> Tensor:
        """Sum of squares of this rank's counted gradients [1]; in float64 it hardly depends on the layout."""
        total = torch.zeros(1, dtype=torch.float64, device=self._shards[0].gradient.device)
        for shard in self._shards:
            for part in shard.counted:
                for chunk in torch.split(shard.gradient[part], _NORM_CHUNK):
                    total += chunk.double().square_().sum()
        return total

    def _pieces(self, shard: _Shard, slot: Slot) -> Iterator[Piece]:
        part = _overlap(shard.bucket, slot)
        if part is None:
            return
        start = shard.bucket.shard.start + part.start - slot.start
        held = [("weight", shard.master), ("exp_avg", shard.exp_avg), ("exp_avg_sq", shard.exp_avg_sq)]
        for kind, data in held[:1] if shard.bucket.frozen else held:
            yield from flat_pieces(kind, slot.spec, data[part], start, owned=self._is_counted(slot))


def _overlap(bucket: Bucket, slot: Slot) -> slice | None:
    """The elements of the shard that belong to ``slot``, counted from the start of the shard."""
    start = max(slot.start, bucket.shard.start) - bucket.shard.start
    stop = min(slot.stop, bucket.shard.stop) - bucket.shard.start
    return slice(start, stop) if start < stop else None


def _ranges(bucket: Bucket, wanted: Callable[[Slot], bool]) -> tuple[slice, ...]:
    """The parts of the shard whose parameters are ``wanted``; neighbours become one range, with the zeros between."""
    ranges: list[slice] = []
    joins = False
    for slot in bucket.slots:
        part = _overlap(bucket, slot)
        if part is None:
            continue
        if not wanted(slot):
            joins = False
        elif joins:
            ranges[-1] = slice(ranges[-1].start, part.stop)
        else:
            ranges.append(part)
            joins = True
    return tuple(ranges)
