"""Cross entropy from logits that are cut along the vocabulary, without ever gathering them.

Three numbers a token travel: the largest logit, the sum of the exponentials, the target's logit (Megatron-LM, Shoeybi
et al. 2019, section 3). Kept for the backward pass are the logits in their own dtype and one number a token; the
softmax is computed again there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.groups import MAX, Group
from engine.tensor_parallel.embedding import num_real_rows


def _target_columns(targets: Tensor, start: int, real: int) -> tuple[Tensor, Tensor]:
    """Column of each target [..., 1] among this rank's, and whether it is there at all [...]."""
    local = targets - start
    here = (local >= 0) & (local < real)
    return local.clamp(0, real - 1).unsqueeze(-1), here


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, group: Group) -> Tensor:
        width = logits.shape[-1]
        start, real = group.rank * width, num_real_rows(vocab_size, width, group)
        shown = logits[..., :real]
        wide = torch.promote_types(logits.dtype, torch.float32)

        # A rank that holds nothing but padding has no largest logit.
        top = shown.amax(-1).to(wide) if real else logits.new_full(targets.shape, -torch.inf, dtype=wide)
        group.all_reduce(top, MAX).wait()

        # [0]: sum of exponentials, [1]: the target's logit, both relative to the largest logit.
        sums = torch.zeros((2, *targets.shape), dtype=wide, device=logits.device)
        if real:
            sums[0] = torch.sub(shown, top.unsqueeze(-1)).exp_().sum(-1)
            columns, here = _target_columns(targets, start, real)
            sums[1] = torch.where(here, shown.gather(-1, columns).squeeze(-1) - top, 0.0)
        group.all_reduce(sums).wait()

        # A target outside the vocabulary is never a small error: NaN in loss and gradients, without a synchronisation.
        log_sum = sums[0].log().masked_fill((targets < 0) | (targets >= vocab_size), torch.nan)
        ctx.save_for_backward(logits, targets, top + log_sum)
        ctx.start, ctx.real = start, real
        return log_sum - sums[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, log_normaliser = ctx.saved_tensors
        start, real = ctx.start, ctx.real
        if not real:
            return torch.zeros_like(logits), None, None, None
        gradient = torch.sub(logits[..., :real], log_normaliser.unsqueeze(-1)).exp_()
        columns, here = _target_columns(targets, start, real)
        gradient.scatter_add_(-1, columns, -here.to(gradient.dtype).unsqueeze(-1))
        gradient.mul_(grads[0].unsqueeze(-1))
        gradient = gradient.to(logits.dtype)
        if real < logits.shape[-1]:
            gradient = F.pad(gradient, (0, logits.shape[-1] - real))
        return gradient, None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int, group: Group) -> Tensor:
    """Loss of each token [...] in fp32 (fp64 for fp64 logits), the same on every rank of the group.

    ``logits`` [..., padded vocabulary / tp] are this rank's columns, ``targets`` [...] int64 global token ids. Columns
    beyond ``vocab_size`` take no part: probability 0, gradient 0. A target outside the vocabulary gives NaN.
    """
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits, targets, vocab_size, group)  # type: ignore[no-untyped-call]
    return losses
