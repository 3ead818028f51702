"""Plain safetensors files, read and written one tensor at a time.

The format: eight bytes with the length of a JSON header, the header (dtype, shape and byte range of each tensor), the
bytes (https://github.com/huggingface/safetensors#format). The ``safetensors`` package wants all tensors of a file in
memory for writing and maps the file for reading; here memory is bounded by one tensor.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.errors import CheckpointDamaged
from engine.checkpoint.manifest import DTYPES
from engine.checkpoint.pieces import dtype_name
from engine.checkpoint.shard import host_memory, write_all
from engine.checkpoint.sources import DiskSource

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_TORCH_NAMES = {theirs: ours for ours, (theirs, _) in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; ``start`` in bytes from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class SafetensorsFile:
    """One file to read from. ``tensors`` by name. Raises CheckpointDamaged when the file is not what it has to be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._source = DiskSource(path.parent)
        try:
            self.tensors = self._parse()
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> Tensor:
        """The tensor ``name`` on the host."""
        stored = self.tensors[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        if stored.num_bytes:
            memory = host_memory(tensor.reshape(-1).view(torch.uint8))
            self._source.read_into(self.path.name, stored.start, memory)
        return tensor

    def close(self) -> None:
        """Let go of the file."""
        self._source.close()

    def _parse(self) -> dict[str, StoredTensor]:
        size = self._source.size(self.path.name)
        if size < 8:
            raise self._damaged("is too short for a safetensors file")
        (length,) = struct.unpack("<Q", self._source.read(self.path.name, 0, 8))
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise self._damaged(f"says that its header has {length} bytes; the file has {size}")
        try:
            header = json.loads(self._source.read(self.path.name, 8, length))
            found = {}
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    dtype: torch.dtype = getattr(torch, _TORCH_NAMES[entry["dtype"]])
                    shape = tuple(map(int, entry["shape"]))
                    fits = end - begin == math.prod(shape) * dtype.itemsize and min((0, *shape)) >= 0
                    if not fits or begin < 0 or 8 + length + end > size:
                        raise self._damaged(f"{name}: bytes {begin} to {end} are no {entry['dtype']} {shape} in it")
                    found[name] = StoredTensor(dtype, shape, 8 + length + begin, end - begin)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(f"has a header that cannot be read: {type(error).__name__}: {error}") from error
        return found

    def _damaged(self, reason: str) -> CheckpointDamaged:
        return CheckpointDamaged(str(self.path), reason)


def write_safetensors(
    path: Path, tensors: Sequence[tuple[str, tuple[int, ...]]], dtype: torch.dtype, values: Iterable[Tensor]
) -> None:
    """Write the new file ``path`` and fsync it: (name, shape) for each tensor, all of ``dtype``, in this order.

    ``values`` gives the contiguous tensors one by one. The bytes depend on the arguments alone. Raises OSError.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors:
        num_bytes = math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPES[dtype_name(dtype)][0],
            "shape": list(shape),
            "data_offsets": [at, at + num_bytes],
        }
        at += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, memoryview(struct.pack("<Q", len(text)) + text))
        for (name, shape), value in zip(tensors, values, strict=True):
            assert tuple(value.shape) == shape and value.dtype == dtype and value.is_contiguous(), name
            write_all(descriptor, host_memory(value.reshape(-1).view(torch.uint8)))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
