"""One rank's shard: which byte goes where in its safetensors file, and the writing of it.

The file is valid safetensors: each box is a tensor named ``<tensor>@<o0,o1,...>`` after its offset, and one more,
``checksums`` [n, 4], has the chunk checksums of all boxes. Boxes with wide elements come first, so that every box
starts at a multiple of its element's size.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.checksums import (
    CHECKSUM_BYTES,
    chunk_bytes_of,
    chunk_checksums,
    num_chunks,
    pack,
)
from engine.checkpoint.errors import CheckpointSaveError
from engine.checkpoint.manifest import DTYPES, BoxEntry, FileEntry
from engine.checkpoint.pieces import Piece, dtype_name

WRITE_BYTES = 1024 * 1024
"""About how much is checksummed and then written at a time: small enough to be still in the cache for the write."""


def shard_file(rank: int) -> str:
    """Name of the file that ``rank`` writes."""
    return f"shard-{rank:05d}.safetensors"


@dataclass(frozen=True)
class PlannedBox:
    """Where one piece goes; positions in bytes from the start of the file."""

    piece: Piece
    start: int
    num_bytes: int
    chunk_bytes: int
    checksums_start: int


@dataclass(frozen=True)
class ShardPlan:
    """The whole layout of one shard file. Only the bytes of the pieces and their checksums are still open."""

    header: bytes
    boxes: tuple[PlannedBox, ...]
    num_bytes: int


def plan_shard(pieces: Sequence[Piece], metadata: dict[str, str]) -> ShardPlan:
    """Lay the pieces out in one file. ``metadata`` goes into the safetensors header. Raises ValueError on twins."""
    ordered = sorted(pieces, key=lambda p: -p.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    sizes = []
    for piece in ordered:
        num_bytes = piece.data.numel() * piece.dtype.itemsize
        key = f"{piece.name}@{','.join(map(str, piece.box.offset))}"
        if key in header:
            raise ValueError(f"two owned pieces start at the same place: {key}")
        header[key] = {
            "dtype": DTYPES[dtype_name(piece.dtype)][0],
            "shape": list(piece.box.size),
            "data_offsets": [at, at + num_bytes],
        }
        at += num_bytes
        sizes.append((num_bytes, chunk_bytes_of(piece.box.size, piece.dtype.itemsize)))
    total_chunks = sum(num_chunks(*s) for s in sizes)
    header["checksums"] = {
        "dtype": "U8",
        "shape": [total_chunks, CHECKSUM_BYTES],
        "data_offsets": [at, at + total_chunks * CHECKSUM_BYTES],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw_header = struct.pack("<Q", len(text)) + text

    boxes = []
    start, checksums_start = len(raw_header), len(raw_header) + at
    for piece, (num_bytes, chunk_bytes) in zip(ordered, sizes, strict=True):
        boxes.append(PlannedBox(piece, start, num_bytes, chunk_bytes, checksums_start))
        start += num_bytes
        checksums_start += CHECKSUM_BYTES * num_chunks(num_bytes, chunk_bytes)
    return ShardPlan(raw_header, tuple(boxes), checksums_start)


def write_shard(plan: ShardPlan, path: Path) -> FileEntry:
    """Write the shard, with its checksums, to the new file ``path`` and fsync it and its directory.

    Streams: beside the pieces themselves only about a MiB and the checksums are in memory. Raises CheckpointSaveError
    after removing the part that was written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise save_error(path, error) from error
    try:
        try:
            entry = _write(plan, descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_directory(path.parent)
    except OSError as error:
        path.unlink()
        raise save_error(path, error) from error
    return entry


def _write(plan: ShardPlan, descriptor: int) -> FileEntry:
    write_all(descriptor, memoryview(plan.header))
    tables = []
    entries = []
    for planned in plan.boxes:
        checksums: list[int] = []
        for memory in _spans(planned.piece.data, planned.chunk_bytes):
            checksums += chunk_checksums(memory, planned.chunk_bytes)
            write_all(descriptor, memory)
        table = pack(checksums)
        tables.append(table)
        entries.append(
            BoxEntry(
                tensor=planned.piece.name,
                offset=planned.piece.box.offset,
                size=planned.piece.box.size,
                start=planned.start,
                num_bytes=planned.num_bytes,
                chunk_bytes=planned.chunk_bytes,
                checksums_start=planned.checksums_start,
                checksum=zlib.crc32(table),
            )
        )
    write_all(descriptor, memoryview(b"".join(tables)))
    return FileEntry(
        num_bytes=plan.num_bytes,
        header_bytes=len(plan.header),
        header_checksum=zlib.crc32(plan.header),
        boxes=tuple(entries),
    )


def _spans(data: Tensor, chunk_bytes: int) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor in order, whole chunks at a time; copied when not on the host."""
    flat = data.detach().reshape(-1).view(torch.uint8)
    step = chunk_bytes * max(1, WRITE_BYTES // chunk_bytes)
    for at in range(0, flat.numel(), step):
        yield host_memory(flat[at : at + step].cpu())


def host_memory(flat: Tensor) -> memoryview:
    """The bytes of a uint8 tensor [n] on the host, without a copy."""
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's stubs show Buffer from Python 3.12 on


def write_all(descriptor: int, memory: memoryview) -> None:
    """Write all of ``memory`` at the file's end; a short write (a disk that fills up) goes on until the error comes."""
    while memory:
        memory = memory[os.write(descriptor, memory) :]


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_error(path: Path, error: OSError) -> CheckpointSaveError:
    """A system error while writing ``path``."""
    return CheckpointSaveError(error.filename or str(path), error.strerror or str(error), error.errno)
