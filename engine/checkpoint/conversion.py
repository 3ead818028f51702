"""What all conversions share: how they tell of their progress and of their result, and how they write small files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.shard import write_all


@dataclass(frozen=True)
class Progress:
    """How far a conversion is; bytes are those of the weights in fp32."""

    bytes_done: int
    bytes_total: int
    tensors_done: int
    tensors_total: int


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote: ``num_bytes`` in ``files`` files that hold ``tensors`` tensors of weights."""

    output: str
    tensors: int
    parameters: int
    files: int
    num_bytes: int


OnProgress = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """The ``OnProgress`` of somebody who does not want to know."""


class Counter:
    """Counts tensors of weights as they go by and tells of each."""

    def __init__(self, tensors: int, parameters: int, on_progress: OnProgress) -> None:
        self._tensors, self._bytes = tensors, 4 * parameters
        self._on_progress = on_progress
        self._tensors_done = self._bytes_done = 0
        self.add(0, tensors=0)

    def add(self, parameters: int, *, tensors: int = 1) -> None:
        """``tensors`` more, with ``parameters`` elements, are done."""
        self._tensors_done += tensors
        self._bytes_done += 4 * parameters
        self._on_progress(Progress(self._bytes_done, self._bytes, self._tensors_done, self._tensors))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError with the path when there is none in it, OSError."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is no JSON object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` to the new file ``path`` and fsync it; the bytes depend on ``value`` alone."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, memoryview(text.encode()))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def directory_bytes(directory: Path) -> tuple[int, int]:
    """Number of files in ``directory`` and their bytes together."""
    sizes = [path.stat().st_size for path in directory.iterdir()]
    return len(sizes), sum(sizes)
