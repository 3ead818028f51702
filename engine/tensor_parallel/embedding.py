"""The token embedding, cut along the vocabulary, and the matrix that it and the language-model head have."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.groups import Group
from engine.parameters import ParameterSpec, Segment, attach
from engine.tensor_parallel.regions import reduce_from_tensor_parallel


def vocab_parallel_weight(
    name: str,
    vocab_size: int,
    padded_vocab_size: int,
    hidden_size: int,
    *,
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
    shared: bool = False,
    owned: bool = True,
) -> nn.Parameter:
    """This rank's rows [padded_vocab_size / tp, hidden_size] of a matrix with one row a token of the vocabulary.

    Rows beyond ``vocab_size`` are padding that no segment covers; a rank may have nothing else.
    """
    assert padded_vocab_size % group.size == 0
    assert vocab_size <= padded_vocab_size
    rows = padded_vocab_size // group.size
    real = num_real_rows(vocab_size, rows, group)
    segments: tuple[Segment, ...] = ()
    if real:
        box = Segment(
            name, (vocab_size, hidden_size), (group.rank * rows, 0), (real, hidden_size), row=0, init="normal"
        )
        segments = (box,)
    # Zeros, for nothing else writes the padding, and its product with a zero gradient has to be zero.
    return attach(
        nn.Parameter(torch.zeros(rows, hidden_size, dtype=dtype, device=device)),
        ParameterSpec(
            (rows, hidden_size),
            segments,
            shared_embedding=shared,
            owned=owned,
            padding_of=None if segments else name,
        ),
    )


def num_real_rows(vocab_size: int, rows: int, group: Group) -> int:
    """How many of this rank's ``rows`` rows belong to real tokens; the rest is padding."""
    return min(max(vocab_size - group.rank * rows, 0), rows)


class VocabParallelEmbedding(nn.Module):
    """Look-up in a ``vocab_parallel_weight``."""

    def __init__(self, weight: nn.Parameter, group: Group) -> None:
        super().__init__()
        self.weight = weight
        self.group = group

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens`` [...] int64, the same on every rank -> [..., hidden], the same on every rank."""
        if self.group.size == 1:
            return F.embedding(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - self.group.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_from_tensor_parallel(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)
