"""Give a stage's parameters values without an optimizer: cuts of global tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.models.transformer import Stage, initial_values
from engine.parameters import ParameterSpec, Segment, spec_of
from engine.planning.config import ModelConfig


def cut(whole: Tensor, segment: Segment) -> Tensor:
    """The box of ``segment`` out of its global tensor (a view)."""
    return whole[tuple(slice(o, o + s) for o, s in zip(segment.offset, segment.size, strict=True))]


@torch.no_grad()
def fill(parameter: Tensor, spec: ParameterSpec, whole_of: Callable[[Segment], Tensor]) -> None:
    """Write each segment's values, taken from ``whole_of(segment)``, into ``parameter``; padding becomes zero."""
    parameter.zero_()
    for segment in spec.segments:
        parameter.narrow(0, segment.row, segment.size[0]).copy_(cut(whole_of(segment), segment))


def initialise(stage: Stage, config: ModelConfig, seed: int) -> None:
    """Fill every parameter of ``stage`` with what a run with that seed starts from."""
    for parameter in stage.parameters():
        fill(parameter, spec_of(parameter), initial_values(config, seed))
