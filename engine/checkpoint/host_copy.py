"""A copy of a rank's state in host memory: what a background save reads while training goes on.

There is one buffer a rank, allocated at the first save and used again by every later one, so saving costs one extra
copy of the owned state and no more, however many saves there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.checkpoint.pieces import Piece

_ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every element's size."""


class HostCopy:
    """Room for the owned pieces of one rank. For pieces on a GPU it is page-locked, so they come at full speed.

    Raises MemoryError when the host has no room for it.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = tuple(pieces)
        places = []
        self.num_bytes = 0
        for piece in pieces:
            places.append(self.num_bytes)
            if piece.owned:
                size = piece.data.numel() * piece.dtype.itemsize
                self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        try:
            self._buffer = torch.empty(self.num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(f"no room for a copy of the state, {self.num_bytes} bytes") from error
        self._device = next((p.data.device for p in pieces if p.owned and p.data.is_cuda), None)
        if self._device is not None:
            # Not torch's own pinned memory: its allocator rounds up to a power of two, so up to twice what is needed.
            runtime = _cuda_runtime()
            status = runtime.cudaHostRegister(self._buffer.data_ptr(), self.num_bytes, 0)
            if status != runtime.cudaError.success:
                raise MemoryError(f"no room for a page-locked copy of the state, {self.num_bytes} bytes: {status}")
        self._copies = tuple(
            replace(piece, data=self._view(piece, at)) if piece.owned else piece
            for piece, at in zip(self._pieces, places, strict=True)
        )

    def _view(self, piece: Piece, at: int) -> torch.Tensor:
        size = piece.data.numel() * piece.dtype.itemsize
        return self._buffer[at : at + size].view(piece.dtype).view(piece.box.size)

    @torch.no_grad()
    def take(self) -> Sequence[Piece]:
        """Copy the pieces' present values, over those of the copy before, and return the copies.

        Only what is owned is copied; of other pieces a save looks at the names alone. When this returns, the originals
        may change.
        """
        for piece, copy in zip(self._pieces, self._copies, strict=True):
            if piece.owned:
                copy.data.copy_(piece.data, non_blocking=True)
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()
        return self._copies

    def close(self) -> None:
        """Unlock the memory; nobody may read the copies any more."""
        if self._device is not None:
            _cuda_runtime().cudaHostUnregister(self._buffer.data_ptr())
            self._device = None


def _cuda_runtime() -> Any:
    """The CUDA runtime's own functions; torch has no types for them."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
