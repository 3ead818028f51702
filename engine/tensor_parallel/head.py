"""The language-model head: logits cut along the vocabulary, and the loss from them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.groups import Group
from engine.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from engine.tensor_parallel.linear import column_parallel_product


class VocabParallelHead(nn.Module):
    """Product with a ``vocab_parallel_weight``: the head's own, or the token embedding's when they are tied."""

    def __init__(self, weight: nn.Parameter, vocab_size: int, group: Group) -> None:
        super().__init__()
        self.weight = weight
        self.vocab_size = vocab_size
        self.group = group

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """``hidden`` [..., hidden], ``targets`` [...] -> the loss of each token [...], fp32."""
        logits = column_parallel_product(hidden, self.weight, None, self.group)
        return vocab_parallel_cross_entropy(logits, targets, self.vocab_size, self.group)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden`` [..., hidden] -> the logits of the whole true vocabulary [..., vocab_size], on every rank."""
        local = column_parallel_product(hidden, self.weight, None, self.group).contiguous()
        parts = local.new_empty(self.group.size, *local.shape)
        self.group.all_gather(parts.view(-1), local.view(-1)).wait()
        return parts.movedim(0, -2).flatten(-2)[..., : self.vocab_size]
