"""From a checkpoint to a directory that ``transformers`` loads: config.json and safetensors files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engine.checkpoint.conversion import Converted, Counter, OnProgress, directory_bytes, silent, write_json
from engine.checkpoint.fresh_directory import fresh_directory
from engine.checkpoint.import_huggingface import CONFIG, INDEX, SINGLE
from engine.checkpoint.pieces import dtype_name
from engine.checkpoint.safetensors_files import write_safetensors
from engine.checkpoint.whole_weights import WholeWeights
from engine.models.huggingface import config_of
from engine.models.huggingface_weights import WeightRule, weight_rules

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_SHARD_BYTES = 5_000_000_000


def export_huggingface(
    source: Path,
    target: Path,
    *,
    dtype: Precision = "fp32",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    on_progress: OnProgress = silent,
) -> Converted:
    """Make the weights of the checkpoint ``source`` the directory ``target``.

    A file holds at most ``max_shard_bytes`` of tensors, or one tensor that is larger. The bytes depend on the weights
    and the arguments, not on the layout that saved them. Raises ValueError when the model is neither GPT-2 nor Llama
    or a weight is too large for fp16, CheckpointDamaged when the source is, OSError; then there is no ``target``.
    ``overwrite`` replaces a directory of that kind which is there.
    """
    with closing(WholeWeights(source)) as weights:
        stored_as = DTYPES[dtype]
        config = config_of(weights.model, dtype_name(stored_as))
        rules = weight_rules(weights.model)
        total = sum(math.prod(rule.shape) for rule in rules)
        counter = Counter(len(rules), total, on_progress)
        shards = _cut(rules, stored_as.itemsize, max_shard_bytes)
        with fresh_directory(
            target, overwrite=_is_model if overwrite else None, kind="model in the Hugging Face format"
        ) as aside:
            weight_map = {}
            for number, shard in enumerate(shards, start=1):
                file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                values = _values(shard, weights, stored_as, counter)
                write_safetensors(aside / file, [(rule.theirs, rule.shape) for rule in shard], stored_as, values)
                weight_map.update({rule.theirs: file for rule in shard})
            if len(shards) > 1:
                sizes = {"total_parameters": total, "total_size": total * stored_as.itemsize}
                write_json(aside / INDEX, {"metadata": sizes, "weight_map": weight_map})
            write_json(aside / CONFIG, config)  # last: nothing loads a directory without it
            files, num_bytes = directory_bytes(aside)
    return Converted(str(target), len(rules), total, files, num_bytes)


def _is_model(directory: Path) -> bool:
    return (directory / CONFIG).is_file() and any((directory / name).is_file() for name in (SINGLE, INDEX))


def _cut(rules: Sequence[WeightRule], itemsize: int, limit: int) -> list[list[WeightRule]]:
    """The tensors in order, cut where the next one would make a file larger than ``limit`` bytes."""
    shards: list[list[WeightRule]] = []
    room = 0
    for rule in rules:
        num_bytes = math.prod(rule.shape) * itemsize
        if not shards or num_bytes > room:
            shards.append([])
            room = limit
        shards[-1].append(rule)
        room -= num_bytes
    return shards


def _values(
    rules: Sequence[WeightRule], weights: WholeWeights, dtype: torch.dtype, counter: Counter
) -> Iterator[Tensor]:
    for rule in rules:
        value = rule.join([weights.read(name) for name in rule.ours])
        stored = value.to(dtype)
        if dtype == torch.float16 and (stored.isinf() & value.isfinite()).any():
            raise ValueError(f"dtype fp16: {rule.theirs} has values beyond 65504; take bf16 or fp32")
        yield stored
        counter.add(value.numel())
