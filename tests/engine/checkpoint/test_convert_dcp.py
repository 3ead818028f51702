"""Checkpoints of ``torch.distributed.checkpoint``: plain tensors by our names, there and back."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from engine.checkpoint.errors import CheckpointDamaged
from engine.checkpoint.manifest import read_manifest
from engine.checkpoint.torch_dcp import export_dcp, import_dcp
from engine.checkpoint.verify import verify
from engine.checkpoint.whole_weights import WholeWeights
from tests.engine.checkpoint.small_models import checkpoint_of, llama, weights_of


def stored_weights(checkpoint):
    weights = WholeWeights(checkpoint)
    found = {name: weights.read(name) for name in weights.shapes}
    weights.close()
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.fixture
def checkpoint(tmp_path):
    return checkpoint_of(llama(), tmp_path / "checkpoint")


def test_an_export_is_what_torch_loads_and_comes_back(checkpoint, tmp_path):
    seen = []
    export_dcp(checkpoint, tmp_path / "dcp", on_progress=seen.append)
    assert seen[-1].tensors_done == seen[-1].tensors_total == len(weights_of(llama()))
    theirs = {name: torch.zeros_like(value) for name, value in weights_of(llama()).items()}
    dcp.load(theirs, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same(theirs, weights_of(llama()))
    import_dcp(tmp_path / "dcp", tmp_path / "back", trust_pickle=True)
    assert verify(tmp_path / "back") == []
    assert_same(stored_weights(tmp_path / "back"), weights_of(llama()))
    back, original = read_manifest(tmp_path / "back"), read_manifest(checkpoint)
    assert (back.tensors, back.run) == (original.tensors, original.run)


def test_a_foreign_checkpoint_needs_the_models_settings(tmp_path):
    dcp.save({name: v.bfloat16() for name, v in weights_of(llama()).items()}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(ValueError, match="--model-config"):
        import_dcp(tmp_path / "dcp", tmp_path / "out", trust_pickle=True)
    import_dcp(tmp_path / "dcp", tmp_path / "out", model=llama(), trust_pickle=True)
    assert_same(stored_weights(tmp_path / "out"), {n: v.bfloat16().float() for n, v in weights_of(llama()).items()})


def test_the_pickle_is_not_read_unless_it_is_trusted(checkpoint, tmp_path):
    export_dcp(checkpoint, tmp_path / "dcp")

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="--trust-pickle"):
        import_dcp(tmp_path / "dcp", tmp_path / "out")
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "out").exists()


def test_other_tensors_are_named(tmp_path):
    weights = weights_of(llama())
    del weights["head.weight"]
    weights["final_norm.weight"] = torch.ones(49)
    dcp.save({**weights, "epoch": 3}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(ValueError) as refused:
        import_dcp(tmp_path / "dcp", tmp_path / "out", model=llama(), trust_pickle=True)
    for expected in ("epoch: is in the files", "(49,)", "head.weight: is missing"):
        assert expected in str(refused.value)


def test_damage_is_told_on_either_side_and_leaves_nothing(checkpoint, tmp_path):
    export_dcp(checkpoint, tmp_path / "dcp")
    [(file, entry)] = read_manifest(checkpoint).boxes_by_tensor()["weight/final_norm.weight"]
    raw = bytearray((checkpoint / file).read_bytes())
    raw[entry.start] ^= 1
    (checkpoint / file).write_bytes(raw)
    with pytest.raises(CheckpointDamaged, match=r"final_norm\.weight"):
        export_dcp(checkpoint, tmp_path / "out")
    for damaged in sorted((tmp_path / "dcp").glob("*.distcp"))[:2]:
        damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(CheckpointDamaged, match="dcp"):
        import_dcp(tmp_path / "dcp", tmp_path / "out", trust_pickle=True)
    (tmp_path / "dcp" / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match="metadata"):
        import_dcp(tmp_path / "dcp", tmp_path / "out", trust_pickle=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "dcp"]
    with pytest.raises(FileExistsError, match="--overwrite"):
        export_dcp(checkpoint, tmp_path / "dcp")
