"""Names and places: how a rank's local parameters relate to the global tensors of the model.

A global tensor has a name, a shape and a dtype, whatever the layout. A rank's local parameter is made of *segments*
stacked along dimension 0; each segment is a box (offset, size) of one global tensor. An ordinary parameter has one
segment; a fused QKV matrix has three; an embedding whose last rows are padding has a segment that is shorter than the
parameter. Initialisation, optimizer state and checkpoints all work from this description alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Initializer = Literal["normal", "normal_scaled", "zeros", "ones"]


@dataclass(frozen=True)
class Segment:
    """One box of a global tensor, held as the rows ``[row, row + size[0])`` of a local parameter.

    ``offset`` and ``size`` are in elements of the global tensor, one entry a dimension.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    row: int
    init: Initializer


@dataclass(frozen=True)
class ParameterSpec:
    """Description of one local parameter.

    Rows that no segment covers are padding: zero, never updated to anything else, never saved.
    ``tp_replicated``: every TP rank holds the same values (norms, some biases), so norms and saves count it once.
    ``shared_embedding``: this is the tied embedding, present on the first and the last stage; ``owned`` is False for
    the last stage's copy, which norms and saves leave out.
    ``decay``: takes part in weight decay (matrices do, biases and norms do not).
    ``padding_of``: the tensor's name when all rows of this rank are padding, so that no segment tells it.
    """

    shape: tuple[int, ...]
    segments: tuple[Segment, ...]
    tp_replicated: bool = False
    shared_embedding: bool = False
    owned: bool = True
    decay: bool = True
    padding_of: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The global tensors that the parameter is a part of."""
        return tuple(segment.name for segment in self.segments) or ((self.padding_of,) if self.padding_of else ())


def attach(parameter: nn.Parameter, spec: ParameterSpec) -> nn.Parameter:
    """Bind ``spec`` to ``parameter``; ``spec_of`` gives it back."""
    assert tuple(parameter.shape) == spec.shape
    parameter.everstep_spec = spec  # type: ignore[attr-defined]
    return parameter


def spec_of(parameter: nn.Parameter) -> ParameterSpec:
    """The spec that ``attach`` bound to a parameter."""
    spec: ParameterSpec = parameter.everstep_spec  # type: ignore[attr-defined]
    return spec


def global_init(segment: Segment, *, seed: int, std: float, scaled_std: float) -> Tensor:
    """The whole global tensor that ``segment`` belongs to, in fp32 on the CPU, as a function of (seed, name) alone."""
    if segment.init == "zeros":
        return torch.zeros(segment.global_shape)
    if segment.init == "ones":
        return torch.ones(segment.global_shape)
    digest = hashlib.sha256(f"{seed}:{segment.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(segment.global_shape)
    return values.normal_(0.0, std if segment.init == "normal" else scaled_std, generator=generator)
