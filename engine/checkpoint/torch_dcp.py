"""Weights to and from checkpoints of ``torch.distributed.checkpoint`` (DCP), in one process without a process group.

A plain DCP checkpoint holds a flat dict of tensors by our global names, such as ``layers.0.attention.query.weight``;
``torch.distributed.checkpoint.load`` fills a dict of tensors with these names from it. DCP stores no configuration, so
an export has the model's beside it in ``model.json``, which DCP does not look at.

DCP's ``.metadata`` is a pickle. Reading it can run whatever code its writer chose; an import has to be told that the
directory is trusted. DCP stores no checksums either: what an import reads is not checked.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from engine.checkpoint.conversion import Converted, Counter, OnProgress, directory_bytes, read_json, silent, write_json
from engine.checkpoint.errors import CheckpointDamaged
from engine.checkpoint.fresh_directory import fresh_directory
from engine.checkpoint.import_huggingface import is_checkpoint
from engine.checkpoint.initial_checkpoint import write_initial_checkpoint
from engine.checkpoint.whole_weights import WholeWeights
from engine.models.global_shapes import global_shapes
from engine.planning.config import ModelConfig

METADATA, MODEL = ".metadata", "model.json"
_EXACT_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)


def export_dcp(source: Path, target: Path, *, overwrite: bool = False, on_progress: OnProgress = silent) -> Converted:
    """Make the fp32 weights of the checkpoint ``source`` the DCP checkpoint ``target``.

    DCP keeps the tensors of a file until the file is written, so each tensor gets a file of its own, which bounds the
    memory by the largest tensor. Raises CheckpointDamaged when the source is, OSError; then there is no ``target``.
    ``overwrite`` replaces a DCP checkpoint that is there.
    """
    with closing(WholeWeights(source)) as weights:
        total = sum(map(math.prod, weights.shapes.values()))
        counter = Counter(len(weights.shapes), total, on_progress)
        overwritten = _is_dcp if overwrite else None
        with fresh_directory(target, overwrite=overwritten, kind="DCP checkpoint") as aside:
            write_json(aside / MODEL, weights.model.model_dump(mode="json"))
            described = {name: torch.empty(shape, device="meta") for name, shape in weights.shapes.items()}
            writer = FileSystemWriter(aside, single_file_per_rank=False, thread_count=1, per_thread_copy_ahead=0)
            planner = _LazyPlanner(weights, counter)
            _alone(lambda: save(described, storage_writer=writer, planner=planner, no_dist=True), target)
            files, num_bytes = directory_bytes(aside)
    return Converted(str(target), len(weights.shapes), total, files, num_bytes)


def import_dcp(
    source: Path,
    target: Path,
    *,
    model: ModelConfig | None = None,
    trust_pickle: bool = False,
    overwrite: bool = False,
    on_progress: OnProgress = silent,
) -> Converted:
    """Make the plain DCP checkpoint ``source`` the checkpoint ``target``: step 0, generation 0, moments zero.

    ``model`` is taken from ``source``'s model.json when not given. Raises ValueError when ``trust_pickle`` is not set,
    when the model is not known, or when the tensors are not exactly those of the model; CheckpointDamaged when a file
    cannot be read; OSError. Then there is no ``target``. ``overwrite`` replaces a checkpoint that is there.
    """
    if not trust_pickle:
        raise ValueError(
            f"{source / METADATA} is a pickle, which can run code when it is read; "
            "give --trust-pickle if you trust whoever wrote it"
        )
    if model is None:
        if not (source / MODEL).is_file():
            raise ValueError(f"{source} has no {MODEL}: give the model's settings with --model-config")
        model = ModelConfig.model_validate(read_json(source / MODEL))
    reader = FileSystemReader(source)
    try:
        found = reader.read_metadata().state_dict_metadata
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError) as error:
        raise CheckpointDamaged(str(source / METADATA), f"cannot be read: {type(error).__name__}: {error}") from error
    shapes = global_shapes(model)
    dtypes = _dtypes(found, shapes)
    total = sum(map(math.prod, shapes.values()))
    counter = Counter(len(shapes), total, on_progress)

    def values() -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            value = torch.empty(shape, dtype=dtypes[name])
            _alone(partial(load, {name: value}, storage_reader=reader, no_dist=True), source)
            yield name, value
            counter.add(value.numel())

    with fresh_directory(target, overwrite=is_checkpoint if overwrite else None, kind="checkpoint") as aside:
        write_initial_checkpoint(aside, model, values(), job=f"import of {source.name}")
        files, num_bytes = directory_bytes(aside)
    return Converted(str(target), len(shapes), total, files, num_bytes)


def _is_dcp(directory: Path) -> bool:
    return (directory / METADATA).is_file()


class _LazyPlanner(DefaultSavePlanner):
    """Plans from tensors without memory and reads each one at the moment when DCP writes it."""

    def __init__(self, weights: WholeWeights, counter: Counter) -> None:
        super().__init__(flatten_state_dict=False)
        self._weights, self._counter = weights, counter

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The values of a tensor of the plan."""
        value = self._weights.read(index.fqn)
        self._counter.add(value.numel())
        return value


def _alone(work: Callable[[], Any], directory: Path) -> None:
    """Run a call of DCP, which wraps every exception, our own and those that end the program too, and unwrap it."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            work()
    except CheckpointException as wrapped:
        cause, _ = next(iter(wrapped.failures.values()))
        if isinstance(cause, RuntimeError | pickle.UnpicklingError | EOFError | KeyError | AssertionError):
            raise CheckpointDamaged(str(directory), f"DCP failed: {type(cause).__name__}: {cause}") from cause
        raise cause from None


def _dtypes(found: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.dtype]:
    """The dtype of each tensor. Raises ValueError unless the stored tensors are exactly those of ``shapes``."""
    problems = []
    for name in sorted(found.keys() | shapes.keys()):
        entry, shape = found.get(name), shapes.get(name)
        if entry is None:
            problems.append(f"{name}: is missing")
        elif shape is None:
            problems.append(f"{name}: is in the files, the model has no such tensor")
        elif not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{name}: is no tensor")
        elif tuple(entry.size) != shape:
            problems.append(f"{name}: shape {tuple(entry.size)}, the model has {shape}")
        elif entry.properties.dtype not in _EXACT_IN_FP32:
            problems.append(f"{name}: {entry.properties.dtype}; fp32, bf16 and fp16 can be read")
    if problems:
        raise ValueError("the tensors are not those of the model: " + "; ".join(problems))
    return {name: found[name].properties.dtype for name in shapes}
