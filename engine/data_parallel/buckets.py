"""Flat buffers for the parameters and gradients of a stage, cut into buckets that are reduced during backward.

Buckets lie in reverse order of use, so the first bucket is the first to have all its gradients. In the last backward
pass of a step each bucket is reduce-scattered over the data-parallel group as soon as it is full, while backward goes
on with the layers below (Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704, section 3.2.3). Each rank ends with
the summed gradients of its shard of every bucket, which is all that ZeRO-1 needs (``distributed_optimizer.py``).

Gradients are sums: a replica may have contributed more micro-batches than another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from engine.groups import Groups, Pending
from engine.parameters import ParameterSpec, spec_of

ALIGNMENT = 64
"""Parameters and shards start at multiples of this many elements (128 bytes in bf16): kernels choose their way by the
alignment of their operands, and neither their speed nor their rounding should depend on a parameter's neighbours."""


@dataclass(frozen=True, eq=False)
class Slot:
    """The place of one parameter in its bucket: elements [start, stop)."""

    parameter: nn.Parameter
    spec: ParameterSpec
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Bucket:
    """A run of parameters in flat memory.

    ``parameters`` [n] in the model's dtype and ``gradients`` [n] in fp32 have the same places; n is a multiple of the
    data-parallel size, and elements outside the slots are zero. ``shard`` is the range that this rank updates.
    ``frozen``: none of its parameters is trained, and ``gradients`` is empty.
    ``shared_embedding``: the one slot is the tied embedding, whose other copy is on the other end of the pipeline.
    """

    index: int
    slots: tuple[Slot, ...]
    parameters: Tensor
    gradients: Tensor
    shard: slice
    shared_embedding: bool
    frozen: bool
    missing: set[Slot] = field(default_factory=set)
    """Parameters whose gradient is not yet complete in this step."""


class ParameterBuckets:
    """Moves ``parameters`` (given in the order in which forward uses them) into buckets and reduces their gradients.

    Each parameter becomes a view of its bucket. ``bucket_size_mb`` is the size of a bucket's gradients in MiB; a
    parameter is never split, so a large one makes a large bucket. All parameters have the same dtype; rows that their
    spec calls padding are set to zero. Parameters that require no gradient are frozen: they have buckets of their own,
    the last ones, of which only the parameters travel.

    A step: backward passes accumulate; ``arm`` right before the last one; ``finish`` after it. ``trace``, when it is a
    list, gets (event, bucket or -1, seconds by ``time.perf_counter``) for "launched", "backward_ended" and "reduced".
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        groups: Groups,
        *,
        bucket_size_mb: float,
        trace: list[tuple[str, int, float]] | None = None,
    ) -> None:
        assert parameters
        assert len({(p.dtype, p.device) for p in parameters}) == 1
        self._groups = groups
        self.trace = trace
        self.dtype = parameters[0].dtype
        limit = int(bucket_size_mb * 2**20) // 4
        trained, frozen = (
            _divide(
                [p for p in reversed(parameters) if p.requires_grad is wanted],
                limit,
                separate_embedding=groups.layout.pp > 1,
            )
            for wanted in (True, False)
        )
        parts = trained + frozen
        sizes = [_padded(sum(_padded(p.numel()) for p in part), groups.dp.size) for part in parts]
        device = parameters[0].device
        flat_parameters = torch.zeros(sum(sizes), dtype=self.dtype, device=device)
        gradient_sizes = sizes[: len(trained)] + [0] * len(frozen)
        self._flat_gradients = torch.zeros(sum(gradient_sizes), dtype=torch.float32, device=device)
        self.buckets: list[Bucket] = []
        for part, values, gradients in zip(
            parts, torch.split(flat_parameters, sizes), torch.split(self._flat_gradients, gradient_sizes), strict=True
        ):
            self.buckets.append(self._fill(part, values, gradients, frozen=len(self.buckets) >= len(trained)))
        self.trained = self.buckets[: len(trained)]
        self._pending: list[Pending] = []
        self._armed = False

    def arm(self) -> None:
        """The next backward pass completes the gradients: buckets leave as soon as they are full."""
        assert not self._armed and not self._pending
        for bucket in self.trained:
            bucket.missing.update(bucket.slots)
        self._armed = True

    def finish(self) -> None:
        """Reduce what backward has not launched (parameters that took no part in it must not stall), wait for all.

        Afterwards ``gradients[shard]`` of each trained bucket holds the sum over the replicas; the rest of it is
        undefined until ``zero_gradients``. Raises RuntimeError when a peer is gone.
        """
        self._note("backward_ended", -1)
        self._armed = False
        while len(self._pending) < len(self.trained):
            self._launch_next()
        for bucket, pending in zip(self.trained, self._pending, strict=True):
            pending.wait()
            if bucket.shared_embedding:
                # Both copies get the same bits, so equal updates keep them equal.
                self._groups.embedding.all_reduce(bucket.gradients[bucket.shard]).wait()
            self._note("reduced", bucket.index)
        self._pending.clear()

    def zero_gradients(self) -> None:
        """Make ready for the next step's accumulation."""
        self._flat_gradients.zero_()

    def gather_parameters(self, buckets: Sequence[Bucket]) -> list[Pending]:
        """Start to collect every rank's shard of the ``buckets``, so that all replicas hold all of their parameters."""
        return [self._groups.dp.all_gather(b.parameters, b.parameters[b.shard]) for b in buckets]

    @torch.no_grad()
    def _fill(self, part: list[nn.Parameter], values: Tensor, gradients: Tensor, *, frozen: bool) -> Bucket:
        slots, start = [], 0
        for parameter in part:
            spec = spec_of(parameter)
            slot = Slot(parameter, spec, start, start + parameter.numel())
            view = values[slot.start : slot.stop].view(spec.shape)
            for segment in spec.segments:
                rows = slice(segment.row, segment.row + segment.size[0])
                view[rows] = parameter[rows]
            parameter.data = view
            slots.append(slot)
            start += _padded(parameter.numel())
        length = len(values) // self._groups.dp.size
        bucket = Bucket(
            index=len(self.buckets),
            slots=tuple(slots),
            parameters=values,
            gradients=gradients,
            shard=slice(self._groups.dp.rank * length, (self._groups.dp.rank + 1) * length),
            shared_embedding=self._groups.layout.pp > 1 and slots[0].spec.shared_embedding,
            frozen=frozen,
        )
        for slot in () if frozen else slots:
            if self.dtype == torch.float32:
                # Autograd adds to a gradient that is there in place, so it writes straight into the bucket.
                slot.parameter.grad = gradients[slot.start : slot.stop].view(slot.spec.shape)
            slot.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._accumulated, bucket, slot)
            )
        return bucket

    def _accumulated(self, bucket: Bucket, slot: Slot, parameter: Tensor) -> None:
        """Called by autograd when a backward pass has added its whole gradient to ``parameter.grad``."""
        if self.dtype != torch.float32:
            assert parameter.grad is not None
            bucket.gradients[slot.start : slot.stop].add_(parameter.grad.view(-1))
            parameter.grad = None
        if self._armed:
            bucket.missing.remove(slot)
            # In the order of buckets, not in that of completion: every replica has to issue the same order.
            while len(self._pending) < len(self.trained) and not self.trained[len(self._pending)].missing:
                self._launch_next()

    def _launch_next(self) -> None:
        bucket = self.trained[len(self._pending)]
        bucket.missing.clear()
        self._note("launched", bucket.index)
        self._pending.append(self._groups.dp.reduce_scatter(bucket.gradients[bucket.shard], bucket.gradients))

    def _note(self, event: str, bucket: int) -> None:
        if self.trace is not None:
            self.trace.append((event, bucket, time.perf_counter()))


def _padded(numel: int, parts: int = 1) -> int:
    multiple = ALIGNMENT * parts
    return -(-numel // multiple) * multiple


def _divide(parameters: list[nn.Parameter], limit: int, *, separate_embedding: bool) -> list[list[nn.Parameter]]:
    """Cut the list into runs of at most ``limit`` elements (or one parameter). The shared embedding can stay alone."""
    parts: list[list[nn.Parameter]] = []
    room, alone = 0, False
    for parameter in parameters:
        own = separate_embedding and spec_of(parameter).shared_embedding
        if not parts or own or alone or parameter.numel() > room:
            parts.append([])
            room = limit
        parts[-1].append(parameter)
        room -= parameter.numel()
        alone = own
    return parts
