"""The full check of one checkpoint: every byte against its checksum, every tensor against its boxes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.boxes import Box
from engine.checkpoint.errors import CheckpointDamaged
from engine.checkpoint.manifest import MANIFEST, Manifest, coverage_problems, read_manifest
from engine.checkpoint.reader import Reader
from engine.checkpoint.sources import DiskSource


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. ``tensor`` and ``box`` are None when it is about a file as a whole."""

    damage: CheckpointDamaged
    tensor: str | None = None
    box: Box | None = None


class WatchedSource(DiskSource):
    """Tells ``on_bytes`` how many bytes were read, after each read."""

    def __init__(self, directory: Path, on_bytes: Callable[[int], None]) -> None:
        super().__init__(directory)
        self._on_bytes = on_bytes

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """See ``Source``."""
        super().read_into(file, offset, buffer)
        self._on_bytes(len(buffer))


def _ignore(num_bytes: int) -> None:
    """Nobody wants to know."""


def verify(directory: Path) -> list[CheckpointDamaged]:
    """Everything that is wrong with the checkpoint in ``directory``, one finding a box; empty when it is good.

    Reads all of it, with bounded memory.
    """
    return [finding.damage for finding in examine(directory)]


def examine(directory: Path, on_bytes: Callable[[int], None] = _ignore) -> list[Finding]:
    """What ``verify`` says, with tensors and boxes. ``on_bytes`` hears of every read."""
    try:
        manifest = read_manifest(directory)
    except CheckpointDamaged as damage:
        return [Finding(damage)]
    path = str(directory / MANIFEST)
    found = [Finding(CheckpointDamaged(path, problem)) for problem in coverage_problems(manifest)]
    for file in manifest.files:
        found += examine_file(directory, manifest, file, on_bytes)
    return found


def examine_file(
    directory: Path, manifest: Manifest, file: str, on_bytes: Callable[[int], None] = _ignore
) -> list[Finding]:
    """What is wrong with one shard file of the checkpoint in ``directory``."""
    entry = manifest.files[file]
    source = WatchedSource(directory, on_bytes)
    reader = Reader(source, manifest.files)
    try:
        try:
            reader.check_size(file)
            header = source.read(file, 0, entry.header_bytes)
        except CheckpointDamaged as damage:
            return [Finding(damage)]
        found = []
        if zlib.crc32(header) != entry.header_checksum:
            found.append(Finding(CheckpointDamaged(source.describe(file), "its header does not fit the manifest")))
        for box in entry.boxes:
            try:
                reader.check(file, box)
            except CheckpointDamaged as damage:
                found.append(Finding(damage, box.tensor, box.box))
        return found
    finally:
        source.close()
