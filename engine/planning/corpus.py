"""Whether a Megatron-compatible ``.bin``/``.idx`` pair can be trained on, told from the header and the two sizes alone.

The layout of the index, little endian, as Megatron-Core's ``indexed_dataset.py`` writes it::

    magic 9 bytes | version u64 | dtype code u8 | sequences u64 | entries of the document index u64
    length of each sequence i32 | byte offset of each sequence i64 | first sequence of each document, then the end i64

No numpy here: the service looks at a corpus before it takes a job, and a look costs the same for any size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_OF_CODE = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
BYTES_OF_DTYPE = {"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2}
"""Bytes of one token, for the types that token ids may have."""


class CorpusError(ValueError):
    """A corpus that cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class CorpusSummary:
    """What the index says of a corpus. ``num_sequences`` is ``num_documents`` unless documents were cut up."""

    num_documents: int
    num_sequences: int
    num_tokens: int
    dtype: str

    def num_samples(self, sequence_length: int) -> int:
        """Training samples in one epoch; raises CorpusError when there is not one.

        Sample k holds the tokens ``[k * sequence_length, (k + 1) * sequence_length]`` of the concatenated documents:
        one token more than the sequence, because targets are inputs moved by one.
        """
        samples = (self.num_tokens - 1) // sequence_length
        if samples < 1:
            raise CorpusError(
                f"data.path: the corpus has {self.num_tokens} tokens, one sample of train.sequence_length "
                f"{sequence_length} needs {sequence_length + 1}"
            )
        return samples


def bin_path(prefix: str | Path) -> Path:
    """The file of the tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The file of the index."""
    return Path(f"{prefix}.idx")


def check_corpus(path: str | Path) -> CorpusSummary:
    """Summarise the pair with the prefix ``path``.

    Raises CorpusError, a ValueError, when a file is missing, unreadable, empty, truncated, of another format or kind,
    or when the two do not belong together.
    """
    index, tokens = idx_path(path), bin_path(path)
    try:
        return _check(index, tokens)
    except FileNotFoundError as error:
        hint = "; give the prefix, without .bin or .idx" if str(path).endswith((".bin", ".idx")) else ""
        raise CorpusError(f"data.path: {error.filename} does not exist{hint}") from None
    except OSError as error:
        raise CorpusError(f"data.path: {error.filename or index} cannot be read: {error.strerror}") from error


def _check(index: Path, tokens: Path) -> CorpusSummary:
    index_bytes, token_bytes = index.stat().st_size, tokens.stat().st_size
    for file, size in ((index, index_bytes), (tokens, token_bytes)):
        if size == 0:
            raise CorpusError(f"data.path: {file} is empty (0 bytes)")
    with index.open("rb") as stream:
        header = stream.read(HEADER.size)
        if not header.startswith(MAGIC[: len(header)]):
            raise CorpusError(f"data.path: {index} is not a Megatron index: it does not begin with {MAGIC!r}")
        if len(header) < HEADER.size:
            raise CorpusError(
                f"data.path: {index} is truncated: {index_bytes} bytes, its header alone has {HEADER.size}"
            )
        _, version, code, num_sequences, num_entries = HEADER.unpack(header)
        if version != VERSION:
            raise CorpusError(f"data.path: {index} has version {version}, this reader knows {VERSION}")
        dtype = DTYPE_OF_CODE.get(code)
        if dtype not in BYTES_OF_DTYPE:
            raise CorpusError(f"data.path: {index} has dtype code {code} ({dtype or 'unknown'}), no type for token ids")
        expected = HEADER.size + 12 * num_sequences + 8 * num_entries
        if index_bytes != expected:
            raise CorpusError(
                f"data.path: {index} is {'truncated' if index_bytes < expected else 'too long'}: {index_bytes} bytes, "
                f"its header of {num_sequences} sequences and {num_entries} document entries asks for {expected}"
            )
        if num_sequences == 0 or num_entries < 2:
            raise CorpusError(f"data.path: {index} holds no documents")
        last_length = _number(stream, "<i", HEADER.size + 4 * (num_sequences - 1))
        last_offset = _number(stream, "<q", HEADER.size + 4 * num_sequences + 8 * (num_sequences - 1))
        last_entry = _number(stream, "<q", index_bytes - 8)
    if last_entry != num_sequences:
        raise CorpusError(
            f"data.path: {index} is damaged: its documents end at sequence {last_entry} of {num_sequences}"
        )
    expected = last_offset + last_length * BYTES_OF_DTYPE[dtype]
    if token_bytes != expected:
        raise CorpusError(
            f"data.path: {tokens} and {index} do not belong together: the index asks for {expected} bytes of tokens, "
            f"the file has {token_bytes}{' (truncated?)' if token_bytes < expected else ''}"
        )
    return CorpusSummary(
        num_documents=num_entries - 1,
        num_sequences=num_sequences,
        num_tokens=token_bytes // BYTES_OF_DTYPE[dtype],
        dtype=dtype,
    )


def _number(stream: BinaryIO, layout: str, offset: int) -> int:
    stream.seek(offset)
    value: int = struct.unpack(layout, stream.read(struct.calcsize(layout)))[0]
    return value
