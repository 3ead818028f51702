"""A checkpoint from weights alone: the state of a run that starts at step 0 from these weights.

Moments are there and zero, as they are in such a run, so the checkpoint is like every other: any layout loads it, and
no reader has a special case. They take twice the space of the weights on disk and none in memory.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.boxes import Box
from engine.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from engine.checkpoint.pieces import Piece, tensors_of
from engine.checkpoint.save import publish
from engine.checkpoint.shard import plan_shard, shard_file, write_shard
from engine.models.global_shapes import global_shapes
from engine.planning.config import ModelConfig
from engine.planning.layout import Layout

_SHARD_WEIGHT_BYTES = 64 * 1024 * 1024
"""Weights that are gathered before a shard is written; as much as the largest tensor when that has more."""


def write_initial_checkpoint(
    directory: Path, model: ModelConfig, weights: Iterable[tuple[str, Tensor]], *, job: str
) -> Manifest:
    """Write a complete checkpoint of step 0, generation 0, into ``directory``, which is there and empty.

    ``weights`` gives each global tensor of ``model`` once, in any order and any floating dtype that fp32 holds exactly,
    and raises when it cannot. ``job`` is what the manifest says of its origin. In memory are at most about three times
    the largest tensor. Raises CheckpointSaveError.
    """
    shapes = global_shapes(model)
    largest = max(map(math.prod, shapes.values()))
    zeros = torch.from_numpy(
        np.zeros(largest, dtype=np.float32)
    )  # numpy's take no memory as long as they are only read
    limit = max(_SHARD_WEIGHT_BYTES, 4 * largest)
    tensors: dict[str, TensorEntry] = {}
    files: dict[str, FileEntry] = {}
    batch: list[Piece] = []

    def flush() -> None:
        name = shard_file(len(files))
        plan = plan_shard(batch, {"job": job, "step": "0", "rank": "0"})
        files[name] = write_shard(plan, directory / name)
        tensors.update(tensors_of(batch))
        batch.clear()

    gathered = 0
    for name, weight in weights:
        shape = shapes[name]
        assert tuple(weight.shape) == shape, f"{name}: {tuple(weight.shape)}, the model has {shape}"
        num_bytes = 4 * weight.numel()
        if batch and gathered + num_bytes > limit:
            flush()
            gathered = 0
        gathered += num_bytes
        # A copy, for the tensor may be a view of one that is much larger.
        data = weight.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        nothing = zeros[: data.numel()].view(shape)
        for kind, values in (("weight", data), ("exp_avg", nothing), ("exp_avg_sq", nothing)):
            batch.append(Piece(f"{kind}/{name}", shape, torch.float32, Box.whole(shape), values))
    flush()
    assert len(tensors) == 3 * len(shapes), "a weight is missing"
    manifest = Manifest(
        job=job,
        generation=0,
        step=0,
        consumed_samples=0,
        saved_at=time.time(),
        tensors=dict(sorted(tensors.items())),
        files=files,
        layout=Layout().model_dump(mode="json"),
        run={"model": model.model_dump(mode="json")},
        versions={"torch": torch.__version__, "python": platform.python_version()},
    )
    publish(manifest, directory)
    return manifest
