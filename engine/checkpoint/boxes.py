"""Boxes: rectangular parts of global tensors, and the arithmetic on them. No tensors here, only integers.

All offsets and sizes are in elements, one entry a dimension; "flat" means row-major. A 0-d tensor has one box,
``Box((), ())``, of one element.

``Piece``, a box together with its values on this rank, needs torch and is in ``engine.checkpoint.pieces``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``offset[d] <= index[d] < offset[d] + size[d]`` of a tensor. Never empty."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.size) or any(o < 0 for o in self.offset) or any(s < 1 for s in self.size):
            raise ValueError(f"no box: offset {self.offset}, size {self.size}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is all of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index, for each dimension."""
        return tuple(o + s for o, s in zip(self.offset, self.size, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The elements that both boxes hold; None when there are none."""
        start = tuple(map(max, self.offset, other.offset))
        size = tuple(e - s for s, e in zip(start, map(min, self.end, other.end), strict=True))
        return Box(start, size) if all(s > 0 for s in size) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` is in this box."""
        return all(a <= b for a, b in zip(self.offset, other.offset, strict=True)) and all(
            a >= b for a, b in zip(self.end, other.end, strict=True)
        )

    def relative_to(self, outer: Box) -> Box:
        """This box in the coordinates of ``outer``, which contains it: ``outer``'s first element becomes index 0."""
        assert outer.contains(self), f"{self} is not inside {outer}"
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.size)

    def shifted(self, by: Sequence[int]) -> Box:
        """This box moved by ``by``: the inverse of ``relative_to`` when ``by`` is the outer box's offset."""
        return Box(tuple(a + b for a, b in zip(self.offset, by, strict=True)), self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that cuts this box out of its tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offset, self.size, strict=True)) + "]"


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Cut the flat range ``[start, stop)`` of a tensor of ``shape`` into boxes, in order, each contiguous in memory.

    Yields (box, flat index of its first element). At most ``2 * ndim - 1`` boxes: three for a matrix (the rest of a
    row, whole rows, the beginning of a row). Raises ValueError when the range leaves the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range [{start}, {stop}) is not inside a tensor of shape {tuple(shape)}")
    strides = strides_of(shape)
    while start < stop:
        # The outermost dimension that can advance by at least one whole step from here.
        dim = next((d for d, step in enumerate(strides) if start % step == 0 and stop - start >= step), None)
        if dim is None:
            yield Box((), ()), 0
            return
        index = tuple(start // step % extent for step, extent in zip(strides, shape, strict=True))
        count = min((stop - start) // strides[dim], shape[dim] - index[dim])
        yield Box(index, (1,) * dim + (count,) + tuple(shape[dim + 1 :])), start
        start += count * strides[dim]


def flat_start(box: Box, shape: Sequence[int]) -> int:
    """Flat index, in a tensor of ``shape``, of the first element of ``box``."""
    return sum(o * s for o, s in zip(box.offset, strides_of(shape), strict=True))


def first_gap(shape: Sequence[int], boxes: Iterable[Box]) -> Box | None:
    """Some part of a tensor of ``shape`` that no box covers, or None when every element is covered at least once.

    The boxes have to lie inside the tensor. A sweep over dimension 0: between two neighbouring starts or ends of boxes
    the set of boxes is constant, and those have to cover the remaining dimensions. Quick when few boxes share a row,
    as in every parallel layout.
    """
    if 0 in shape:
        return None
    gap = _gap(tuple(shape), sorted((b.offset, b.end) for b in boxes), 0)
    return None if gap is None else Box(*gap)


_Extent = tuple[tuple[int, ...], tuple[int, ...]]


def _gap(shape: tuple[int, ...], extents: list[_Extent], dim: int) -> _Extent | None:
    """``first_gap`` over dimensions ``dim`` and up. ``extents``: (start, end) of boxes, ascending in ``start[dim]``.

    Returns (offset, size) of the gap in those dimensions.
    """
    rest = shape[dim:]
    if not extents:
        return (0,) * len(rest), rest
    if dim == len(shape):
        return None
    cuts = sorted({0, shape[dim], *(s[dim] for s, _ in extents), *(e[dim] for _, e in extents)})
    active: list[_Extent] = []
    entered = 0
    for low, high in pairwise(cuts):
        active = [x for x in active if x[1][dim] > low]
        while entered < len(extents) and extents[entered][0][dim] <= low:
            active.append(extents[entered])
            entered += 1
        inner = shape[dim + 1 :]
        if any(not any(s[dim + 1 :]) and e[dim + 1 :] == inner for s, e in active):
            continue  # one box has these rows whole: what every layout but a column cut looks like
        gap = _gap(shape, sorted(active, key=lambda x: x[0][dim + 1 :]), dim + 1)
        if gap is not None:
            return (low, *gap[0]), (high - low, *gap[1])
    return None


def covers(shape: Sequence[int], boxes: Sequence[Box], *, exactly_once: bool = True) -> bool:
    """Whether ``boxes`` lie inside a tensor of ``shape`` and together hold every element (by default: only once)."""
    if any(e > extent for b in boxes for e, extent in zip(b.end, shape, strict=True)):
        return False
    if exactly_once and sum(b.numel for b in boxes) != math.prod(shape):
        return False
    return first_gap(shape, boxes) is None
