"""``manifest.json``: what a checkpoint holds and where. A checkpoint is complete when its manifest is there.

The file is one line of JSON that any JSON reader understands; its last field is the CRC-32 of all bytes before it.
Unknown fields are ignored, so optional ones can be added within a format version; a reader refuses every version but
its own. No torch here.

Names of tensors are global and unfused; ``weight/``, ``exp_avg/`` and ``exp_avg_sq/`` prefix them. Boxes say where the
parts of a tensor are, whatever layout wrote them; ``layout`` is there to be shown and decides nothing.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.checkpoint.boxes import Box, covers, first_gap
from engine.checkpoint.checksums import CHECKSUM_BYTES, num_chunks
from engine.checkpoint.errors import CheckpointDamaged, CheckpointUnsupported

FORMAT: Literal["everstep-checkpoint"] = "everstep-checkpoint"
FORMAT_VERSION: Literal[1] = 1
MANIFEST = "manifest.json"

DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""torch's name of each dtype that a checkpoint can hold: (name in safetensors, bytes an element)."""


class Entry(BaseModel):
    """Base of the manifest's parts."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class TensorEntry(Entry):
    """A global tensor: its shape and torch's name of its dtype."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype][1]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class BoxEntry(Entry):
    """One stored box. Positions are in bytes from the start of the file that lists it."""

    tensor: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int = Field(ge=0)
    num_bytes: int = Field(ge=0)
    chunk_bytes: int = Field(gt=0, description="size of the chunks that have a checksum each")
    checksums_start: int = Field(ge=0, description="where the box's chunk checksums are, 4 bytes each, little-endian")
    checksum: int = Field(description="CRC-32 of the bytes of those chunk checksums")

    @property
    def box(self) -> Box:
        """Where the box lies in its tensor."""
        return Box(self.offset, self.size)

    @property
    def checksums_bytes(self) -> int:
        """Length of the box's chunk checksums."""
        return CHECKSUM_BYTES * num_chunks(self.num_bytes, self.chunk_bytes)


class FileEntry(Entry):
    """One shard file and the boxes in it. The header is the safetensors one, its eight length bytes included."""

    num_bytes: int
    header_bytes: int
    header_checksum: int
    boxes: tuple[BoxEntry, ...]


class Manifest(Entry):
    """All of a checkpoint's description. ``step`` counts completed steps."""

    format: Literal["everstep-checkpoint"] = FORMAT
    format_version: Literal[1] = FORMAT_VERSION
    job: str
    generation: int
    step: int
    consumed_samples: int
    saved_at: float = Field(description="seconds since 1970")
    checksum_algorithm: Literal["crc32"] = "crc32"
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry] = Field(description="by name, relative to the checkpoint's directory")
    layout: dict[str, Any] = Field(description="the layout that wrote it")
    run: dict[str, Any] = Field(description="the RunConfig that wrote it")
    extra: dict[str, Any] = Field(default_factory=dict, description="what else the training state needs: RNG, scaler")
    versions: dict[str, str] = Field(default_factory=dict, description="of the software that wrote it")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPES:
                raise ValueError(f"tensor {name}: dtype {tensor.dtype} is unknown")
        for name, file in self.files.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"file {name} is outside the checkpoint's directory")
            for entry in file.boxes:
                _check_box(entry, file, self.tensors)
        return self

    @property
    def num_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(f.num_bytes for f in self.files.values())

    def boxes_by_tensor(self) -> dict[str, list[tuple[str, BoxEntry]]]:
        """For each tensor the (file, box) pairs that hold it."""
        found: dict[str, list[tuple[str, BoxEntry]]] = {name: [] for name in self.tensors}
        for file, entry in self.files.items():
            for box in entry.boxes:
                found[box.tensor].append((file, box))
        return found


def _check_box(entry: BoxEntry, file: FileEntry, tensors: dict[str, TensorEntry]) -> None:
    where = f"box {entry.offset}+{entry.size} of {entry.tensor}"
    tensor = tensors.get(entry.tensor)
    if tensor is None:
        raise ValueError(f"{where}: there is no such tensor")
    if len(entry.offset) != len(tensor.shape) or not Box.whole(tensor.shape).contains(entry.box):
        raise ValueError(f"{where} is not inside the shape {tensor.shape}")
    if entry.num_bytes != math.prod(entry.size) * tensor.itemsize or entry.chunk_bytes % tensor.itemsize:
        raise ValueError(f"{where}: {entry.num_bytes} bytes in chunks of {entry.chunk_bytes} do not fit its dtype")
    if max(entry.start + entry.num_bytes, entry.checksums_start + entry.checksums_bytes) > file.num_bytes:
        raise ValueError(f"{where} ends after its file's {file.num_bytes} bytes")


def coverage_problems(manifest: Manifest) -> list[str]:
    """One line for each tensor that the stored boxes do not hold exactly once."""
    problems = []
    for name, stored in manifest.boxes_by_tensor().items():
        shape = manifest.tensors[name].shape
        boxes = [entry.box for _, entry in stored]
        if not covers(shape, boxes):
            gap = first_gap(shape, boxes)
            problems.append(f"{name}: " + ("a box is stored twice" if gap is None else f"{gap} is not stored"))
    return problems


_SEAL = b',"manifest_crc32":"%08x"}\n'
_SEAL_BYTES = len(_SEAL % 0)


def manifest_bytes(manifest: Manifest) -> bytes:
    """The content of ``manifest.json``."""
    body = json.dumps(manifest.model_dump(mode="json"), separators=(",", ":"), allow_nan=False).encode()[:-1]
    return body + _SEAL % zlib.crc32(body)


def parse_manifest(raw: bytes, file: str) -> Manifest:
    """Inverse of ``manifest_bytes``. Raises CheckpointDamaged, naming ``file``, for whatever it cannot stand for.

    The error is CheckpointUnsupported when a program of another version wrote it.
    """
    try:
        loose = json.loads(raw)
    except ValueError as error:
        raise CheckpointDamaged(file, f"is no JSON: {error}") from error
    if not isinstance(loose, dict) or loose.get("format") != FORMAT:
        raise CheckpointDamaged(file, "is no manifest of a checkpoint")
    if loose.get("format_version") != FORMAT_VERSION:
        raise CheckpointUnsupported(
            file, f"has format version {loose.get('format_version')}; this program reads version {FORMAT_VERSION}"
        )
    body, seal = raw[:-_SEAL_BYTES], raw[-_SEAL_BYTES:]
    if seal != _SEAL % zlib.crc32(body):
        raise CheckpointDamaged(file, "its checksum does not fit its content")
    try:
        return Manifest.model_validate(loose)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointDamaged(file, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the checkpoint in ``directory``. Raises CheckpointDamaged when it is missing or not whole."""
    path = directory / MANIFEST
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointDamaged(str(path), error.strerror or str(error)) from error
    return parse_manifest(raw, str(path))
