"""Reading parts of stored boxes: only the chunks that are needed, each checked before its values count."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import pairwise, product

import torch
from torch import Tensor

from engine.checkpoint.boxes import Box, flat_start, strides_of
from engine.checkpoint.checksums import chunk_checksums, unpack
from engine.checkpoint.errors import CheckpointDamaged
from engine.checkpoint.manifest import BoxEntry, FileEntry
from engine.checkpoint.shard import host_memory
from engine.checkpoint.sources import Source

SPAN_BYTES = 4 * 1024 * 1024
"""About how much is read, checked and copied at a time."""


class Reader:
    """Reads parts of the boxes of one checkpoint from one source. Not for several threads."""

    def __init__(self, source: Source, files: dict[str, FileEntry]) -> None:
        self._source = source
        self._files = files
        self._sized: set[str] = set()
        self._checksums: dict[tuple[str, int], list[int]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def check_size(self, file: str) -> None:
        """Raise CheckpointDamaged when ``file`` is missing or has not the length that the manifest says."""
        if file not in self._sized:
            size, expected = self._source.size(file), self._files[file].num_bytes
            if size != expected:
                raise self._damaged(file, f"has {size} bytes, the manifest says {expected}")
            self._sized.add(file)

    def read(self, file: str, entry: BoxEntry, part: Box, target: Tensor) -> None:
        """Copy ``part`` of the stored box ``entry`` of ``file`` into ``target``.

        ``part`` is in the stored box's own coordinates and has the shape of ``target``, which may be strided and on
        any device. Raises CheckpointDamaged; ``target`` may hold a part of the values then.
        """
        self.check_size(file)
        if _is_contiguous_in(part, entry.size) and target.is_contiguous():
            first = flat_start(part, entry.size) * target.dtype.itemsize
            flat = target.reshape(-1).view(torch.uint8)
            self._read_flat(file, entry, first, flat)
            return
        for band in _bands(part, entry.size, SPAN_BYTES // target.dtype.itemsize):
            self._read_band(file, entry, band, target[band.relative_to(part).slices])

    def check(self, file: str, entry: BoxEntry) -> None:
        """Compare all of a stored box with its checksums. Raises CheckpointDamaged."""
        step = entry.chunk_bytes * max(1, SPAN_BYTES // entry.chunk_bytes)
        for start in range(0, entry.num_bytes, step):
            self._read_chunks(file, entry, start, host_memory(self._room(min(step, entry.num_bytes - start))))

    def _read_flat(self, file: str, entry: BoxEntry, first: int, target: Tensor) -> None:
        """Read the box's bytes from ``first`` on into ``target`` [n], uint8; whole chunks straight into their place."""
        end = first + target.numel()
        low, high = _inner_chunks(entry, first, end)
        step = entry.chunk_bytes * max(1, SPAN_BYTES // entry.chunk_bytes)
        cuts = {first, *range(low, high, step), high, end} if low < high else {first, end}
        for start, stop in pairwise(sorted(cuts)):
            aim = target[start - first : stop - first]
            outer = _outer_chunks(entry, start, stop)
            if outer == (start, stop) and aim.device.type == "cpu":
                self._read_chunks(file, entry, start, host_memory(aim))
            else:
                room = self._room(outer[1] - outer[0])
                self._read_chunks(file, entry, outer[0], host_memory(room))
                aim.copy_(room[start - outer[0] : stop - outer[0]])

    def _read_band(self, file: str, entry: BoxEntry, band: Box, target: Tensor) -> None:
        """Read a part that is not contiguous in the stored box: run by run, runs that share or touch chunks at once."""
        itemsize = target.dtype.itemsize
        ranges: list[tuple[int, int]] = []
        for start, numel in _runs(band, entry.size):
            low, high = _outer_chunks(entry, start * itemsize, (start + numel) * itemsize)
            if ranges and low <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], high)
            else:
                ranges.append((low, high))
        base = ranges[0][0]
        room = self._room(ranges[-1][1] - base)
        memory = host_memory(room)
        for low, high in ranges:
            self._read_chunks(file, entry, low, memory[low - base : high - base])
        first = flat_start(band, entry.size) - base // itemsize
        target.copy_(torch.as_strided(room.view(target.dtype), band.size, strides_of(entry.size), first))

    def _read_chunks(self, file: str, entry: BoxEntry, start: int, memory: memoryview) -> None:
        """Read whole chunks of the box, from its byte ``start``, and compare them with their checksums."""
        self._source.read_into(file, entry.start + start, memory)
        first = start // entry.chunk_bytes
        found = chunk_checksums(memory, entry.chunk_bytes)
        if found != self._checksums_of(file, entry)[first : first + len(found)]:
            at = entry.start + start
            raise self._damaged(file, f"{entry.tensor} {entry.box} does not fit its checksums from byte {at} on")

    def _checksums_of(self, file: str, entry: BoxEntry) -> list[int]:
        """The stored chunk checksums of a box, themselves checked against the manifest."""
        key = file, entry.checksums_start
        if key not in self._checksums:
            raw = self._source.read(file, entry.checksums_start, entry.checksums_bytes)
            if zlib.crc32(raw) != entry.checksum:
                raise self._damaged(file, f"the checksums of {entry.tensor} {entry.box} do not fit the manifest")
            self._checksums[key] = unpack(raw)
        return self._checksums[key]

    def _room(self, num_bytes: int) -> Tensor:
        """Host memory [num_bytes], uint8, that is good until the next call."""
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes]

    def _damaged(self, file: str, reason: str) -> CheckpointDamaged:
        return CheckpointDamaged(self._source.describe(file), reason)


def _outer_chunks(entry: BoxEntry, start: int, stop: int) -> tuple[int, int]:
    """The smallest range of whole chunks that holds the box's bytes ``[start, stop)``."""
    chunk = entry.chunk_bytes
    return start - start % chunk, min(stop + -stop % chunk, entry.num_bytes)


def _inner_chunks(entry: BoxEntry, start: int, stop: int) -> tuple[int, int]:
    """The largest range of whole chunks inside the box's bytes ``[start, stop)``; start >= stop when there is none."""
    chunk = entry.chunk_bytes
    return start + -start % chunk, stop if stop == entry.num_bytes else stop - stop % chunk


def _contiguous_from(box: Box, shape: tuple[int, ...]) -> int:
    """The outermost dimension from which on the box's elements follow each other in a tensor of ``shape``."""
    dim = max(len(shape) - 1, 0)
    while dim > 0 and box.size[dim] == shape[dim]:
        dim -= 1
    return dim


def _is_contiguous_in(box: Box, shape: tuple[int, ...]) -> bool:
    return all(size == 1 for size in box.size[: _contiguous_from(box, shape)])


def _runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The box as runs of neighbouring elements of a tensor of ``shape``: (flat start, number of elements)."""
    strides = strides_of(shape)
    dim = _contiguous_from(box, shape)
    first = flat_start(box, shape)
    numel = box.size[dim] * strides[dim]
    for index in product(*map(range, box.size[:dim])):
        yield first + sum(i * s for i, s in zip(index, strides, strict=False)), numel


def _bands(box: Box, shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Cut a box into parts that each lie within about ``limit`` elements of a tensor of ``shape``, in order."""
    strides = strides_of(shape)
    span = 1 + sum((size - 1) * stride for size, stride in zip(box.size, strides, strict=True))
    dim = next((d for d, size in enumerate(box.size) if size > 1), None)
    if span <= limit or dim is None:
        yield box
        return
    count = max(1, limit // strides[dim])
    for at in range(0, box.size[dim], count):
        offset, size = list(box.offset), list(box.size)
        offset[dim] += at
        size[dim] = min(count, box.size[dim] - at)
        yield from _bands(Box(tuple(offset), tuple(size)), shape, limit)
