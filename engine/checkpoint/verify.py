"""The full check of one checkpoint: every byte against its checksum, every tensor against its boxes."""

from __future__ import annotations

import zlib
from pathlib import Path

from engine.checkpoint.errors import CheckpointDamaged
from engine.checkpoint.manifest import MANIFEST, FileEntry, Manifest, coverage_problems, read_manifest
from engine.checkpoint.reader import Reader
from engine.checkpoint.sources import DiskSource, Source


def verify(directory: Path) -> list[CheckpointDamaged]:
    """Everything that is wrong with the checkpoint in ``directory``, one finding a box; empty when it is good.

    Reads all of it, with bounded memory.
    """
    try:
        manifest = read_manifest(directory)
    except CheckpointDamaged as damage:
        return [damage]
    found = [CheckpointDamaged(str(directory / MANIFEST), problem) for problem in coverage_problems(manifest)]
    source = DiskSource(directory)
    try:
        for file, entry in manifest.files.items():
            found += _damages_of(file, entry, manifest, source)
    finally:
        source.close()
    return found


def _damages_of(file: str, entry: FileEntry, manifest: Manifest, source: Source) -> list[CheckpointDamaged]:
    reader = Reader(source, manifest.files)
    try:
        reader.check_size(file)
        header = source.read(file, 0, entry.header_bytes)
    except CheckpointDamaged as damage:
        return [damage]
    found = []
    if zlib.crc32(header) != entry.header_checksum:
        found.append(CheckpointDamaged(source.describe(file), "its header does not fit the manifest"))
    for box in entry.boxes:
        try:
            reader.check(file, box)
        except CheckpointDamaged as damage:
            found.append(damage)
    return found
