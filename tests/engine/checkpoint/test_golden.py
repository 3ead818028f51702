"""A checkpoint of every released format version loads, bit by bit, in the layout that wrote it and in others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.checkpoint.load import load_checkpoint
from engine.checkpoint.manifest import FORMAT_VERSION, read_manifest
from engine.checkpoint.verify import verify
from engine.data_parallel.buckets import ParameterBuckets
from engine.data_parallel.distributed_optimizer import DistributedOptimizer
from engine.models.transformer import Stage
from engine.planning.config import RunConfig
from engine.planning.layout import Layout
from tests.golden.make import GOLDEN, digest, gathered, held
from tests.harness import groups_of, run_ranks

VERSIONS = sorted(int(path.name.removeprefix("format-")) for path in GOLDEN.glob("format-*"))
LAYOUTS = [Layout(), Layout(tp=2), Layout(dp=3), Layout(tp=2, dp=2)]


def golden(version: int) -> tuple[Path, dict]:
    directory = GOLDEN / f"format-{version}"
    expected = json.loads((directory / "expected.json").read_text())
    return directory / expected["checkpoint"], expected


def test_there_is_one_for_every_version_up_to_the_current_one_and_they_are_small():
    assert list(range(1, FORMAT_VERSION + 1)) == VERSIONS
    for version in VERSIONS:
        size = sum(path.stat().st_size for path in (GOLDEN / f"format-{version}").rglob("*") if path.is_file())
        assert size < 60_000


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_whole_and_says_where_its_run_stood(version):
    checkpoint, expected = golden(version)
    assert verify(checkpoint) == []
    manifest = read_manifest(checkpoint)
    for field in ("format_version", "step", "generation", "consumed_samples"):
        assert getattr(manifest, field) == expected[field], field
    assert {name: list(tensor.shape) for name, tensor in manifest.tensors.items()} == {
        name: tensor["shape"] for name, tensor in expected["tensors"].items()
    }


def _load(rank, store, layout, checkpoint):
    run = RunConfig.model_validate(read_manifest(checkpoint).run)
    groups = groups_of(layout, rank, store)
    stage = Stage(run.model, groups, dtype=torch.float32, device=torch.device("cpu"))
    buckets = ParameterBuckets(list(stage.parameters()), groups, bucket_size_mb=run.train.bucket_size_mb)
    pieces = DistributedOptimizer(buckets, groups, run.train).pieces()
    load_checkpoint(pieces, checkpoint, groups.world)
    return held(pieces)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_loads_bit_by_bit_in_every_layout(version, layout):
    checkpoint, expected = golden(version)
    tensors = gathered(run_ranks(layout.world_size, _load, layout, checkpoint))
    found = {name: {"dtype": v.dtype.name, "sha256": digest(v)} for name, v in tensors.items()}
    assert found == {
        name: {"dtype": tensor["dtype"], "sha256": tensor["sha256"]} for name, tensor in expected["tensors"].items()
    }
