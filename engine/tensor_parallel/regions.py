"""Borders of the tensor-parallel region: where partial sums become whole values.

Outside the region every TP rank holds the same activations, inside each holds its cut. The way in (identity forward,
sum of the gradients backward) is part of the column-parallel product in ``linear.py``, where it overlaps with the
weight gradient; the way out is here. Sequence parallelism would turn both sums into reduce-scatter and all-gather, in
these same two places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.groups import Group


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(partial)
        group.all_reduce(partial).wait()
        return partial

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def reduce_from_tensor_parallel(partial: Tensor, group: Group) -> Tensor:
    """Sum ``partial`` over the group; every rank ends with the same bits, and the gradient passes unchanged.

    The sum is made in place: ``partial`` must be contiguous and freshly computed, with no other reader.
    """
    if group.size == 1:
        return partial
    assert partial.is_contiguous()
    reduced: Tensor = _ReduceFrom.apply(partial, group)  # type: ignore[no-untyped-call]
    return reduced
