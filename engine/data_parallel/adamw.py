"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) on flat tensors, operation by operation as torch does it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from engine.planning.config import TrainConfig


def adamw_(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    train: TrainConfig,
    lr: float,
    step: int,
    decayed: Iterable[slice],
) -> None:
    """Update ``weight`` and both moments [n] in place, all fp32. ``step`` counts this update too, from 1.

    ``decayed`` are the ranges that weight decay applies to. The order of operations is that of
    ``torch.optim.AdamW(foreach=False)``, so results have the same bits.
    """
    for part in decayed:
        weight[part].mul_(1 - lr * train.weight_decay)
    exp_avg.lerp_(gradient, 1 - train.adam_beta1)
    exp_avg_sq.mul_(train.adam_beta2).addcmul_(gradient, gradient, value=1 - train.adam_beta2)
    correction1 = 1 - train.adam_beta1**step
    correction2 = 1 - train.adam_beta2**step
    denominator = exp_avg_sq.sqrt().div_(correction2**0.5).add_(train.adam_eps)
    weight.addcdiv_(exp_avg, denominator, value=-(lr / correction1))
