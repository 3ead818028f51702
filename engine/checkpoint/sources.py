"""Where stored bytes come from. A reader needs byte ranges of named files and nothing else."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

from engine.checkpoint.errors import CheckpointDamaged


class Source(ABC):
    """Something that has the files of one checkpoint. ``bytes_read`` counts what was asked of it."""

    def __init__(self) -> None:
        self.bytes_read = 0

    @abstractmethod
    def describe(self, file: str) -> str:
        """The place of ``file``, for people: a path or an address."""

    @abstractmethod
    def size(self, file: str) -> int:
        """Length of ``file`` in bytes. Raises CheckpointDamaged when it is not there."""

    @abstractmethod
    def _read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Do what ``read_into`` says."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of ``file`` from ``offset``. Raises CheckpointDamaged when they cannot be had."""
        self._read_into(file, offset, buffer)
        self.bytes_read += len(buffer)

    def read(self, file: str, offset: int, num_bytes: int) -> bytearray:
        """``num_bytes`` bytes of ``file`` from ``offset``. Raises CheckpointDamaged when they cannot be had."""
        raw = bytearray(num_bytes)
        self.read_into(file, offset, memoryview(raw))
        return raw

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""


class DiskSource(Source):
    """A checkpoint in a directory. It reads rather than maps: a bad disk is an error here, in a mapping a signal."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._descriptors: dict[str, int] = {}

    def describe(self, file: str) -> str:
        """See ``Source``."""
        return str(self._directory / file)

    def size(self, file: str) -> int:
        """See ``Source``."""
        try:
            return os.fstat(self._open(file)).st_size
        except OSError as error:
            raise self._damaged(file, error) from error

    def _read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        try:
            descriptor = self._open(file)
            done = 0
            while done < len(buffer):
                got = os.preadv(descriptor, [buffer[done:]], offset + done)
                if got == 0:
                    raise CheckpointDamaged(self.describe(file), f"ends before byte {offset + len(buffer)}")
                done += got
        except OSError as error:
            raise self._damaged(file, error) from error

    def _open(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self._directory / file, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[file]

    def _damaged(self, file: str, error: OSError) -> CheckpointDamaged:
        return CheckpointDamaged(self.describe(file), error.strerror or str(error))

    def close(self) -> None:
        """See ``Source``."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
