"""Frozen parameters: which ones ``train.frozen`` means, and taking them out of the training.

A frozen parameter has no gradient, no moments and no weight decay, and a checkpoint holds its weight alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from engine.models.global_shapes import global_shapes
from engine.parameters import spec_of
from engine.planning.config import ModelConfig


def matching(patterns: Sequence[str], names: Iterable[str]) -> frozenset[str]:
    """The names that one of the shell-style ``patterns`` matches."""
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def frozen_names(model: ModelConfig, patterns: Sequence[str]) -> frozenset[str]:
    """Global names of the parameters of ``model`` that ``patterns`` freeze; the same in every layout.

    Raises ValueError when a pattern matches nothing, when nothing is left to train, or when only some of the tensors
    that are computed as one product (query, key and value; gate and up) would be frozen.
    """
    names = tuple(global_shapes(model))
    for pattern in patterns:
        if not matching([pattern], names):
            raise ValueError(f"train.frozen: {pattern!r} matches no parameter; names are like layers.0.mlp.up.weight")
    frozen = matching(patterns, names)
    if len(frozen) == len(names):
        raise ValueError(f"train.frozen: {', '.join(map(repr, patterns))} leave no parameter to train")
    for name in names:
        for first, others in (("attention.query", ("attention.key", "attention.value")), ("mlp.gate", ("mlp.up",))):
            if f".{first}." not in name:
                continue
            together = [name, *(name.replace(first, other) for other in others)]
            if 0 < len(frozen.intersection(together)) < len(together):
                raise ValueError(f"train.frozen: {', '.join(together)} are one product: freeze all of them or none")
    return frozen


def freeze(stage: nn.Module, names: frozenset[str]) -> None:
    """Take the parameters of ``stage`` whose global names are in ``names`` out of the training."""
    for parameter in stage.parameters():
        if names.issuperset(spec_of(parameter).names):
            parameter.requires_grad_(False)
