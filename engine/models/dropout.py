"""Dropout of hidden states whose masks depend on the place in the training and on nothing else.

A mask is a function of (seed, step, micro-batch of the global batch, site, place in [seq, batch, hidden]). So it is
the same under every layout, in whatever order a pipeline runs its micro-batches, and after a restart, and no generator
has a state that a checkpoint would have to hold. Hidden states are whole on every tensor-parallel rank, where attention
probabilities are cut by heads inside a fused kernel with a generator of its own: those have no dropout here.

Masks are drawn by the device that uses them: a CPU and a GPU, or GPUs of unlike models, draw different ones.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class MaskKey:
    """Which forward pass of a run it is. ``step`` and ``microbatch`` count from 0, the latter in the global batch."""

    seed: int
    step: int
    microbatch: int

    def generator(self, site: str, device: torch.device) -> torch.Generator:
        """A fresh generator for this pass through ``site``."""
        digest = hashlib.sha256(f"dropout:{self.seed}:{self.step}:{self.microbatch}:{site}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class HiddenDropout(nn.Module):
    """Sets each element to zero with probability ``rate`` and scales the others by 1 / (1 - rate).

    ``site`` is the global name of the place in the model; no two places share one.
    """

    def __init__(self, site: str, rate: float) -> None:
        super().__init__()
        self.site = site
        self.rate = rate

    def forward(self, x: Tensor, key: MaskKey | None) -> Tensor:
        """``x`` [seq, batch, hidden], whole on this rank. Without a ``key``, as in evaluation, ``x`` itself."""
        if key is None or self.rate == 0.0:
            return x
        # Uniform fp32 numbers: on a CPU they come from one plain sequence of the generator, where `bernoulli_` depends
        # on the maker of the processor.
        generator = key.generator(self.site, x.device)
        drawn = torch.rand(x.shape, generator=generator, dtype=torch.float32, device=x.device)
        return x * (drawn >= self.rate) * (1.0 / (1.0 - self.rate))
