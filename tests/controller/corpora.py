"""A .bin/.idx pair of zeros, made with the standard library alone."""

from __future__ import annotations

import struct
from pathlib import Path


def write_corpus(prefix: Path, num_tokens: int = 4096) -> None:
    """One document of ``num_tokens`` tokens of type uint16."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_suffix(".bin").write_bytes(bytes(2 * num_tokens))
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1, 2)
    prefix.with_suffix(".idx").write_bytes(header + struct.pack("<iqqq", num_tokens, 0, 0, 1))
