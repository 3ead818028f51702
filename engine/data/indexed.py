"""Corpora on disk: the ``.bin``/``.idx`` pair of Megatron-Core, read through memory maps and written atomically.

The layout of the index is told in ``engine/planning/corpus.py``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from engine.data.aside import AsideFile, fsync_directory
from engine.planning.corpus import (
    DTYPE_OF_CODE,
    HEADER,
    MAGIC,
    VERSION,
    CorpusError,
    CorpusSummary,
    bin_path,
    check_corpus,
    idx_path,
)

__all__ = ["CorpusDescription", "CorpusError", "CorpusWriter", "IndexedCorpus", "describe", "token_dtype"]

Ids = npt.NDArray[np.integer[Any]]
_SCAN_TOKENS = 1 << 22


def token_dtype(vocab_size: int) -> np.dtype[np.integer[Any]]:
    """The type that holds every id below ``vocab_size``: uint16 up to 65,536 (highest id 65,535), int32 above."""
    return np.dtype(np.uint16) if vocab_size <= 1 << 16 else np.dtype(np.int32)


class IndexedCorpus:
    """A corpus, opened read-only; pages come from disk as they are touched.

    ``tokens`` [num_tokens] are all documents one after the other; ``lengths`` [num_sequences] and ``document_starts``
    [num_documents + 1] (in sequences) say where they begin. Raises CorpusError when the pair is not sound.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.summary: CorpusSummary = check_corpus(path)
        index = idx_path(path)
        raw = np.memmap(index, dtype=np.uint8, mode="r")
        count, entries = self.summary.num_sequences, self.summary.num_documents + 1
        at = HEADER.size
        self.lengths: npt.NDArray[np.int32] = np.frombuffer(raw, np.int32, count, at)
        offsets: npt.NDArray[np.int64] = np.frombuffer(raw, np.int64, count, at + 4 * count)
        self.document_starts: npt.NDArray[np.int64] = np.frombuffer(raw, np.int64, entries, at + 12 * count)
        dtype = np.dtype(self.summary.dtype)
        self._ends = np.cumsum(self.lengths, dtype=np.int64)
        if self.lengths.min() < 0 or not np.array_equal(offsets, (self._ends - self.lengths) * dtype.itemsize):
            raise CorpusError(f"data.path: {index} is damaged: its sequences do not follow each other without gaps")
        if self.document_starts[0] != 0 or np.any(np.diff(self.document_starts) < 0):
            raise CorpusError(f"data.path: {index} is damaged: its document entries do not ascend from 0")
        self.tokens: Ids = np.memmap(bin_path(path), dtype=dtype, mode="r")

    def document(self, number: int) -> Ids:
        """The token ids of document ``number``, its end-of-document token included (a view)."""
        first, end = (int(self.document_starts[number + i]) for i in (0, 1))
        begin = int(self._ends[first - 1]) if first else 0
        return self.tokens[begin : int(self._ends[end - 1]) if end else 0]

    def max_id(self) -> int:
        """The highest token id. Reads the whole corpus, a few MiB at a time."""
        return max(
            int(self.tokens[at : at + _SCAN_TOKENS].max()) for at in range(0, self.summary.num_tokens, _SCAN_TOKENS)
        )


@dataclass(frozen=True)
class CorpusDescription:
    """A corpus as shown to people."""

    num_documents: int
    num_tokens: int
    dtype: str
    max_id: int


def describe(path: str | Path) -> CorpusDescription:
    """Describe a corpus; reads all of it for the highest id (``check_corpus`` says the rest without reading)."""
    corpus = IndexedCorpus(path)
    summary = corpus.summary
    return CorpusDescription(summary.num_documents, summary.num_tokens, summary.dtype, corpus.max_id())


class CorpusWriter:
    """Writes a corpus document by document; the pair appears under its final names when the block ends well.

    After an exception, or when no document was added (CorpusError), nothing is left and an older pair is untouched::

        with CorpusWriter(prefix, token_dtype(vocab_size)) as writer:
            writer.add_document(ids)
    """

    def __init__(self, path: str | Path, dtype: npt.DTypeLike) -> None:
        self._path = path
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        codes = {name: code for code, name in DTYPE_OF_CODE.items()}
        if self.dtype.kind not in "iu" or self.dtype.name not in codes:
            raise ValueError(f"dtype {self.dtype.name} is no type for token ids")
        self._code = codes[self.dtype.name]
        self._lengths = array("i")
        self.num_tokens = 0
        self._bin = AsideFile(bin_path(path))
        try:
            self._idx = AsideFile(idx_path(path))
        except BaseException:
            self._bin.discard()
            raise

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    def add_document(self, ids: Ids | Sequence[int]) -> None:
        """Append one document. Raises ValueError when an id does not fit the type."""
        wide = np.asarray(ids)
        if wide.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            if wide.size and (wide.min() < limits.min or wide.max() > limits.max):
                raise ValueError(f"token ids {wide.min()}..{wide.max()} do not fit {self.dtype.name}")
            wide = wide.astype(self.dtype)
        self._bin.stream.write(wide.tobytes())
        self._lengths.append(wide.size)
        self.num_tokens += wide.size

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        stream = self._idx.stream
        stream.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(lengths) + 1))
        stream.write(lengths.tobytes())
        stream.write(offsets.tobytes())
        stream.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())

    def _publish(self) -> None:
        if not self.num_tokens:
            raise CorpusError(f"{bin_path(self._path)} is not written: there is not a single document with tokens")
        self._write_index()
        self._bin.seal()
        self._idx.seal()
        directory = self._bin.target.parent
        # The older index goes first: a new .bin must never stand beside an old .idx, also not after a crash in between.
        self._idx.target.unlink(missing_ok=True)
        fsync_directory(directory)
        try:
            self._bin.publish()
            self._idx.publish()
        except BaseException:
            self._bin.target.unlink(missing_ok=True)
            raise
        fsync_directory(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            self._bin.discard()
            self._idx.discard()
