"""What differs between two checkpoints of any layouts, tensor by tensor, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.global_tensors import GlobalTensors, spans_of
from engine.checkpoint.manifest import Manifest, TensorEntry
from engine.checkpoint.verify import WatchedSource

SPAN_ELEMENTS = 1024 * 1024
"""How many elements of each side are in memory at a time."""


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor differs between two checkpoints.

    ``num_different`` elements have other bits, or other values where the dtypes differ. ``max_abs`` is the largest
    absolute difference where both values are finite, ``num_incomparable`` counts differing elements where one of them
    is not.
    """

    name: str
    numel: int
    num_different: int = 0
    max_abs: float = 0.0
    num_incomparable: int = 0

    @property
    def equal(self) -> bool:
        """Whether all elements are the same."""
        return self.num_different == 0

    def within(self, tolerance: float | None) -> bool:
        """Whether no element differs by more than ``tolerance``; None allows no other bit."""
        return self.equal or (tolerance is not None and not self.num_incomparable and self.max_abs <= tolerance)


@dataclass(frozen=True)
class Comparison:
    """Which tensors of two checkpoints can be compared, and one line for each difference that stands in the way."""

    common: tuple[str, ...]
    problems: tuple[str, ...]
    num_bytes: int


def comparable(first: Manifest, second: Manifest) -> Comparison:
    """Compare the names, shapes and dtypes of two checkpoints. ``num_bytes``: of both sides' common tensors.

    Tensors of equal shape and other dtype are compared by value; the dtype is a problem all the same.
    """
    common, problems, num_bytes = [], [], 0
    for name in sorted(first.tensors.keys() | second.tensors.keys()):
        a, b = first.tensors.get(name), second.tensors.get(name)
        if a is None or b is None:
            problems.append(f"{name}: only in the {'second' if a is None else 'first'}")
            continue
        if a.shape != b.shape:
            problems.append(f"{name}: shape {list(a.shape)} in the first, {list(b.shape)} in the second")
            continue
        if a.dtype != b.dtype:
            problems.append(f"{name}: dtype {a.dtype} in the first, {b.dtype} in the second")
        common.append(name)
        num_bytes += a.numel * (a.itemsize + b.itemsize)
    return Comparison(tuple(common), tuple(problems), num_bytes)


def differences(
    first: Path,
    second: Path,
    manifests: tuple[Manifest, Manifest],
    names: tuple[str, ...],
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[TensorDifference]:
    """Compare the tensors ``names``, which have equal shapes, of the checkpoints in two directories.

    ``on_bytes`` hears of every read. Raises CheckpointDamaged when one of the checkpoints is.
    """
    sources = WatchedSource(first, on_bytes), WatchedSource(second, on_bytes)
    a, b = (GlobalTensors(manifest, source) for manifest, source in zip(manifests, sources, strict=True))
    try:
        for name in names:
            yield _difference(name, manifests[0].tensors[name], a, b)
    finally:
        for source in sources:
            source.close()


def _difference(name: str, tensor: TensorEntry, a: GlobalTensors, b: GlobalTensors) -> TensorDifference:
    num_different, max_abs, num_incomparable = 0, 0.0, 0
    for box in spans_of(tensor.shape, SPAN_ELEMENTS):
        one, other = a.read(name, box).reshape(-1), b.read(name, box).reshape(-1)
        differs = _differing(one, other)
        if differs is None:
            continue
        num_different += int(differs.sum())
        gap = (one[differs].double() - other[differs].double()).abs()
        finite = gap[gap.isfinite()]
        num_incomparable += gap.numel() - finite.numel()
        max_abs = max(max_abs, finite.max().item() if finite.numel() else 0.0)
    return TensorDifference(name, tensor.numel, num_different, max_abs, num_incomparable)


def _differing(one: Tensor, other: Tensor) -> Tensor | None:
    """Which elements of two flat tensors differ, None when no one does: in their bits when the dtypes are equal."""
    if one.dtype != other.dtype:
        differs = one.double() != other.double()
        return differs if bool(differs.any()) else None
    a, b = one.view(torch.uint8), other.view(torch.uint8)
    if torch.equal(a, b):
        return None
    return (a != b).view(one.numel(), -1).any(dim=1)
