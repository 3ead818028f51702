"""Linear layers cut over a tensor-parallel group, the way of Megatron-LM (Shoeybi et al. 2019, section 3).

A column-parallel layer holds some of the output features, a row-parallel layer some of the input features. One after
the other they need a single sum in the forward pass (after the second) and one in the backward pass (before the first).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.groups import Group
from engine.parameters import Initializer, ParameterSpec, Segment, attach
from engine.tensor_parallel.regions import reduce_from_tensor_parallel


class _ColumnParallelProduct(torch.autograd.Function):
    """``x @ weight.T + bias`` whose input gradient is summed over the group while the weight gradient is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad = grads[0].flatten(0, -2)  # [tokens, out / tp]
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = grad @ weight
            pending = ctx.group.all_reduce(grad_x)
            grad_x = grad_x.view(x.shape)
        if needs_weight:
            grad_weight = grad.t() @ x.flatten(0, -2)
        if needs_bias:
            grad_bias = grad.sum(0)
        if needs_x:
            pending.wait()
        return grad_x, grad_weight, grad_bias, None


def column_parallel_product(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """This rank's output features [..., out / tp] of ``x`` [..., in], which is the same on every rank.

    ``weight`` is [out / tp, in]. The gradient of ``x`` is summed over the group.
    """
    if group.size == 1:
        return F.linear(x, weight, bias)
    product: Tensor = _ColumnParallelProduct.apply(x, weight, bias, group)  # type: ignore[no-untyped-call]
    return product


class ColumnParallelLinear(nn.Module):
    """One or more linear layers of the same input, fused, each cut along its output features.

    ``outputs`` maps the global name of each layer to its global number of output features; every rank computes the same
    share of each. Output [..., sum of the shares], in the order of ``outputs``.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.group = group
        for name, features in outputs.items():
            assert features % group.size == 0, f"{name}: {features} features over {group.size} ranks"
        self.shares = [features // group.size for features in outputs.values()]
        rows = sum(self.shares)
        weights, biases, row = [], [], 0
        for (name, features), share in zip(outputs.items(), self.shares, strict=True):
            start = group.rank * share
            weights.append(
                Segment(f"{name}.weight", (features, in_features), (start, 0), (share, in_features), row, "normal")
            )
            biases.append(Segment(f"{name}.bias", (features,), (start,), (share,), row, "zeros"))
            row += share
        self.weight = attach(
            nn.Parameter(torch.empty(rows, in_features, dtype=dtype, device=device)),
            ParameterSpec((rows, in_features), tuple(weights)),
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = attach(
                nn.Parameter(torch.empty(rows, dtype=dtype, device=device)),
                ParameterSpec((rows,), tuple(biases), decay=False),
            )

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., this rank's output features]."""
        return column_parallel_product(x, self.weight, self.bias, self.group)


class RowParallelLinear(nn.Module):
    """A linear layer cut along its input features. Its bias is whole on every rank and added once, after the sum."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        init: Initializer,
        bias: bool,
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        assert in_features % group.size == 0, f"{name}: {in_features} features over {group.size} ranks"
        self.group = group
        share = in_features // group.size
        box = Segment(
            f"{name}.weight",
            (out_features, in_features),
            (0, group.rank * share),
            (out_features, share),
            0,
            init,
        )
        self.weight = attach(
            nn.Parameter(torch.empty(out_features, share, dtype=dtype, device=device)),
            ParameterSpec((out_features, share), (box,)),
        )
        self.bias: nn.Parameter | None = None
        if bias:
            whole = Segment(f"{name}.bias", (out_features,), (0,), (out_features,), 0, "zeros")
            self.bias = attach(
                nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)),
                ParameterSpec((out_features,), (whole,), tp_replicated=True, decay=False),
            )

    def forward(self, x: Tensor) -> Tensor:
        """[..., in / tp] -> [..., out], the same on every rank."""
        y = reduce_from_tensor_parallel(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias
