"""Pieces: boxes of global tensors together with their values in this rank's memory.

``from engine.checkpoint.pieces import Piece, flat_pieces``. Names are ``weight/<global name>``,
``exp_avg/<global name>`` and ``exp_avg_sq/<global name>``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoint.boxes import Box, flat_range_boxes
from engine.checkpoint.manifest import TensorEntry
from engine.parameters import ParameterSpec


@dataclass(frozen=True, eq=False)
class Piece:
    """One box of one global tensor, held by this rank.

    ``data`` is a contiguous view of this rank's memory, of shape ``box.size``: saving reads it, loading writes it.
    ``owned`` is False when another rank saves this box (TP replicas, the second copy of a tied embedding).
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    data: Tensor
    owned: bool = True

    def __post_init__(self) -> None:
        assert tuple(self.data.shape) == self.box.size, f"{self.name}: data {tuple(self.data.shape)}, box {self.box}"
        assert self.data.dtype == self.dtype and self.data.is_contiguous(), self.name
        assert Box.whole(self.global_shape).contains(self.box), f"{self.name}: {self.box} of {self.global_shape}"


def flat_pieces(kind: str, spec: ParameterSpec, data: Tensor, start: int, *, owned: bool = True) -> Iterator[Piece]:
    """The pieces of the flat range ``[start, start + data.numel())`` of one local parameter.

    ``data`` [n] is the rank's memory for that range: a ZeRO-1 shard's part of the parameter, or all of it
    (``start`` 0). ``kind`` is the prefix of the names: ``weight``, ``exp_avg`` or ``exp_avg_sq``. Padding rows give
    no piece. ``owned`` False marks all of them as saved by another rank.
    """
    assert data.dim() == 1 and data.is_contiguous()
    stop = start + data.numel()
    assert start >= 0 and stop <= math.prod(spec.shape), f"[{start}, {stop}) of {spec.shape}"
    row_numel = math.prod(spec.shape[1:])
    for segment in spec.segments:
        first = segment.row * row_numel
        low = max(start, first)
        high = min(stop, first + math.prod(segment.size))
        if low >= high:
            continue
        for box, at in flat_range_boxes(segment.size, low - first, high - first):
            begin = first + at - start
            yield Piece(
                name=f"{kind}/{segment.name}",
                global_shape=segment.global_shape,
                dtype=data.dtype,
                box=box.shifted(segment.offset),
                data=data[begin : begin + box.numel].view(box.size),
                owned=owned,
            )


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, as in the manifest."""
    return str(dtype).removeprefix("torch.")


def tensors_of(pieces: Iterable[Piece]) -> dict[str, TensorEntry]:
    """The global tensors that the pieces are parts of, by name."""
    return {p.name: TensorEntry(shape=p.global_shape, dtype=dtype_name(p.dtype)) for p in pieces}
