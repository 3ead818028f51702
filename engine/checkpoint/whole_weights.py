"""The weights of a checkpoint as whole global tensors, one at a time, whatever layout wrote them."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from engine.checkpoint.boxes import Box
from engine.checkpoint.errors import CheckpointDamaged, CheckpointMismatch
from engine.checkpoint.manifest import MANIFEST, coverage_problems, read_manifest
from engine.checkpoint.reader import Reader
from engine.checkpoint.sources import DiskSource
from engine.models.global_shapes import global_shapes
from engine.planning.config import ModelConfig

_PREFIX = "weight/"


class WholeWeights:
    """The fp32 weights in a checkpoint's directory, each checked against its checksums as it is read.

    ``model`` is the model that wrote it, ``shapes`` its global tensors by name. Raises CheckpointDamaged when the
    manifest or a file is missing or not whole, CheckpointMismatch when the tensors are not those of the model.
    """

    def __init__(self, directory: Path) -> None:
        manifest = read_manifest(directory)
        problems = coverage_problems(manifest)
        if problems:
            raise CheckpointDamaged(str(directory / MANIFEST), "; ".join(problems))
        try:
            self.model = ModelConfig.model_validate(manifest.run.get("model"))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, ("run", "model", *first["loc"])))
            raise CheckpointDamaged(str(directory / MANIFEST), f"{field}: {first['msg']}") from error
        self.shapes = global_shapes(self.model)
        stored = {
            name.removeprefix(_PREFIX): (entry.shape, entry.dtype)
            for name, entry in manifest.tensors.items()
            if name.startswith(_PREFIX)
        }
        expected = {name: (shape, "float32") for name, shape in self.shapes.items()}
        if stored != expected:
            raise CheckpointMismatch(
                [
                    f"{name}: {stored.get(name, 'nothing')} in the checkpoint, {expected.get(name, 'nothing')} expected"
                    for name in sorted(stored.keys() | expected.keys())
                    if stored.get(name) != expected.get(name)
                ]
            )
        self._boxes = manifest.boxes_by_tensor()
        self._source = DiskSource(directory)
        self._reader = Reader(self._source, manifest.files)
        try:
            for name in self.shapes:
                for file, _ in self._boxes[_PREFIX + name]:
                    self._reader.check_size(file)
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> Tensor:
        """The global tensor ``name``, fp32 on the host. Raises CheckpointDamaged when a byte of it was altered."""
        whole = torch.empty(self.shapes[name])
        for file, entry in self._boxes[_PREFIX + name]:
            self._reader.read(file, entry, Box.whole(entry.size), whole[entry.box.slices])
        return whole

    def close(self) -> None:
        """Let go of the files."""
        self._source.close()
