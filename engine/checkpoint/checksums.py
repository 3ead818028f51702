"""Checksums of stored boxes: one CRC-32 a chunk, and one over those.

A stored box is cut into chunks of equal size (the last may be shorter) and each chunk has its own checksum, so that a
reader which needs a part of the box reads and checks the touched chunks only. The list of a box's chunk checksums is
stored with the data; its own checksum is in the manifest. CRC-32 because it finds every accident that a disk or a
network is likely to cause and zlib computes it at about 3 GiB/s a core; it is no protection against an attacker.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

CHECKSUM_BYTES = 4
PLAIN_CHUNK_BYTES = 64 * 1024
"""Size of a chunk where no finer one is of use."""
MIN_CHUNK_BYTES = 1024
"""Smaller chunks would cost more in checksums (4 bytes each) than they save in reading."""
CUTS_OF_A_ROW = (8, 4, 2)


def chunk_bytes_of(size: Sequence[int], itemsize: int) -> int:
    """Size of the chunks of a box of ``size`` elements of ``itemsize`` bytes.

    Long rows are cut into up to eight equal chunks: a layout that cuts columns then reads a part of each row and
    still whole chunks. Short rows are put together into chunks that end at a row's end.
    """
    if len(size) < 2:
        return PLAIN_CHUNK_BYTES
    row_bytes = size[-1] * itemsize
    for parts in CUTS_OF_A_ROW:
        if size[-1] % parts == 0 and row_bytes // parts >= MIN_CHUNK_BYTES:
            return row_bytes // parts
    return row_bytes * max(1, PLAIN_CHUNK_BYTES // row_bytes)


def num_chunks(num_bytes: int, chunk_bytes: int) -> int:
    """Number of chunks of a box of ``num_bytes``."""
    return -(-num_bytes // chunk_bytes)


def chunk_checksums(memory: memoryview, chunk_bytes: int) -> list[int]:
    """The checksum of each chunk of ``memory``, a run of bytes that starts at the start of a chunk."""
    return [zlib.crc32(memory[at : at + chunk_bytes]) for at in range(0, len(memory), chunk_bytes)]


def pack(checksums: Sequence[int]) -> bytes:
    """Checksums as they are stored: four bytes each, little-endian."""
    return struct.pack(f"<{len(checksums)}I", *checksums)


def unpack(raw: bytes | bytearray) -> list[int]:
    """Inverse of ``pack``."""
    return list(struct.unpack(f"<{len(raw) // CHECKSUM_BYTES}I", raw))
