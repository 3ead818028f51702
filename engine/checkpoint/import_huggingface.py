"""From a directory of a GPT-2 or Llama model in the Hugging Face format to a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.conversion import Converted, Counter, OnProgress, directory_bytes, read_json, silent
from engine.checkpoint.fresh_directory import fresh_directory
from engine.checkpoint.initial_checkpoint import write_initial_checkpoint
from engine.checkpoint.manifest import MANIFEST
from engine.checkpoint.safetensors_files import SafetensorsFile
from engine.models.huggingface import model_of
from engine.models.huggingface_weights import HEAD, WeightRule, canonical_name, weight_rules
from engine.planning.config import ModelConfig

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_EXACT_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)


def import_huggingface(
    source: Path, target: Path, *, overwrite: bool = False, on_progress: OnProgress = silent
) -> Converted:
    """Make the directory ``source`` the checkpoint ``target``: step 0, generation 0, weights in fp32, moments zero.

    ``source`` has config.json and model.safetensors, or several files with model.safetensors.index.json. Raises
    ValueError when the model cannot be had, with the field or the tensor, CheckpointDamaged when a file is not whole,
    OSError; then there is no ``target``. ``overwrite`` replaces a checkpoint that is there.
    """
    model = model_of(read_json(source / CONFIG))
    with closing(_Directory(source, model)) as weights:
        total = sum(math.prod(rule.shape) for rule in weights.rules)
        counter = Counter(len(weights.rules), total, on_progress)
        with fresh_directory(target, overwrite=is_checkpoint if overwrite else None, kind="checkpoint") as aside:
            write_initial_checkpoint(aside, model, weights.values(counter), job=f"import of {source.name}")
            files, num_bytes = directory_bytes(aside)
    return Converted(str(target), len(weights.rules), total, files, num_bytes)


def is_checkpoint(directory: Path) -> bool:
    """Whether ``directory`` looks like a checkpoint."""
    return (directory / MANIFEST).is_file()


class _Directory:
    """The weights in a directory; after the constructor every tensor is known to be there with its shape."""

    def __init__(self, source: Path, model: ModelConfig) -> None:
        self.rules = weight_rules(model)
        self._tied = model.tie_embeddings
        self._files: dict[str, SafetensorsFile] = {}
        try:
            self._places = self._find(source, model)
            self._check()
        except BaseException:
            self.close()
            raise

    def values(self, counter: Counter) -> Iterator[tuple[str, Tensor]]:
        """Our global tensors, one tensor of theirs after the other."""
        for rule in self.rules:
            yield from rule.split(self._read(rule.theirs))
            counter.add(math.prod(rule.shape))

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            file.close()

    def _read(self, name: str) -> Tensor:
        file, stored = self._places[name]
        return self._files[file].read(stored)

    def _find(self, source: Path, model: ModelConfig) -> dict[str, tuple[str, str]]:
        """(File, name in it) of each tensor, by the name that the rules have."""
        indexed: dict[str, str] | None = None
        if (source / SINGLE).is_file():
            names = [SINGLE]
        elif (source / INDEX).is_file():
            indexed = _weight_map(source / INDEX)
            names = sorted(set(indexed.values()))
        else:
            raise ValueError(_nothing_to_read(source))
        places: dict[str, tuple[str, str]] = {}
        for name in names:
            self._files[name] = SafetensorsFile(source / name)
            for stored in self._files[name].tensors:
                canonical = canonical_name(stored, model)
                if canonical is None:
                    continue
                if canonical in places:
                    raise ValueError(f"{source}: {stored} is there twice: in {places[canonical][0]} and in {name}")
                places[canonical] = name, stored
        for stored, name in (indexed or {}).items():
            if stored not in self._files[name].tensors:
                raise ValueError(f"{source / INDEX}: {stored} is not in {name}")
        return places

    def _check(self) -> None:
        """Every tensor of the model, with the right shape and dtype, and no other."""
        problems = []
        known: dict[str, WeightRule] = {rule.theirs: rule for rule in self.rules}
        for name in sorted(known.keys() | self._places.keys()):
            if name not in self._places:
                problems.append(f"{name}: is missing")
            elif name not in known:
                if not (name == HEAD and self._tied):
                    problems.append(f"{name}: is in the files, config.json has no place for it")
            else:
                file, stored = self._places[name]
                found = self._files[file].tensors[stored]
                if found.shape != known[name].shape:
                    problems.append(f"{name}: shape {found.shape} in {file}, {known[name].shape} by config.json")
                elif found.dtype not in _EXACT_IN_FP32:
                    problems.append(f"{name}: {found.dtype} in {file}; fp32, bf16 and fp16 can be read")
        if problems:
            raise ValueError("the weights are not those of config.json: " + "; ".join(problems))
        if HEAD in self._places and self._tied:
            embedding = self._read(self.rules[0].theirs)
            if not torch.equal(self._read(HEAD), embedding):
                raise ValueError(f"tie_word_embeddings is true, but {HEAD} differs from {self.rules[0].theirs}")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map: is missing")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{index}: weight_map: {name}: {file!r} is no name of a safetensors file beside it")
    return weight_map


def _nothing_to_read(source: Path) -> str:
    pickles = sorted(path.name for path in source.glob("*.bin"))
    if pickles:
        return (
            f"{source} has its weights only as pickles ({', '.join(pickles)}), which can run code when they are read; "
            "save the model as safetensors with a program that you trust it to"
        )
    return f"{source} has neither {SINGLE} nor {INDEX}"
