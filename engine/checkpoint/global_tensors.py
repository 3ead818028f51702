"""Any box of any global tensor of a checkpoint, whatever layout wrote it: a view of it without layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.checkpoint.boxes import Box, first_gap, flat_range_boxes
from engine.checkpoint.errors import CheckpointDamaged
from engine.checkpoint.manifest import MANIFEST, Manifest
from engine.checkpoint.reader import Reader
from engine.checkpoint.sources import Source


class GlobalTensors:
    """Reads boxes of the global tensors of one checkpoint, each byte checked. Not for several threads."""

    def __init__(self, manifest: Manifest, source: Source) -> None:
        self._manifest = manifest
        self._source = source
        self._reader = Reader(source, manifest.files)
        self._stored = manifest.boxes_by_tensor()

    def read(self, name: str, box: Box) -> Tensor:
        """The values of ``box`` of the tensor ``name``, of the box's size. Raises CheckpointDamaged."""
        values = torch.empty(box.size, dtype=getattr(torch, self._manifest.tensors[name].dtype))
        found = []
        for file, entry in self._stored[name]:
            common = entry.box.intersect(box)
            if common is not None:
                found.append(common.relative_to(box))
                self._reader.read(file, entry, common.relative_to(entry.box), values[found[-1].slices])
        gap = first_gap(box.size, found)
        if gap is not None:
            missing = gap.shifted(box.offset)
            raise CheckpointDamaged(self._source.describe(MANIFEST), f"no stored box has {name} {missing}")
        return values


def spans_of(shape: Sequence[int], max_elements: int) -> Iterator[Box]:
    """Cut a tensor of ``shape`` into boxes of at most ``max_elements`` each that follow each other in memory."""
    numel = 1
    for extent in shape:
        numel *= extent
    for start in range(0, numel, max_elements):
        for box, _ in flat_range_boxes(shape, start, min(start + max_elements, numel)):
            yield box
