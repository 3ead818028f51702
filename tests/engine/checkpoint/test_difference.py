"""Two checkpoints are compared by global tensors: across layouts, in bounded memory, to the bit."""

from __future__ import annotations

import math

import pytest
import torch

from engine.checkpoint.boxes import Box, covers
from engine.checkpoint.difference import comparable, differences
from engine.checkpoint.errors import CheckpointDamaged
from engine.checkpoint.global_tensors import GlobalTensors, spans_of
from engine.checkpoint.manifest import read_manifest
from engine.checkpoint.sources import DiskSource
from engine.planning.layout import Layout
from tests.engine.checkpoint.synthetic import filled, pieces_of, save_all, values_of

LAYOUTS = [Layout(), Layout(tp=4), Layout(pp=3), Layout(tp=2, dp=2), Layout(dp=8)]


def state(layout):
    return [filled(pieces_of(layout, rank)) for rank in range(layout.world_size)]


def saved(directory, layout, edit=lambda pieces: pieces):
    return save_all(directory, layout, [edit(pieces) for pieces in state(layout)])


def compare(first, second):
    manifests = read_manifest(first), read_manifest(second)
    compared = comparable(*manifests)
    found = list(differences(first, second, manifests, compared.common))
    return compared.problems, {one.name: one for one in found if not one.equal}, found


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_the_same_state_is_bit_equal_whatever_layouts_saved_it(tmp_path, layout, monkeypatch):
    monkeypatch.setattr("engine.checkpoint.difference.SPAN_ELEMENTS", 50)
    problems, different, found = compare(saved(tmp_path / "a", Layout()), saved(tmp_path / "b", layout))
    assert problems == () and different == {}
    assert {one.name for one in found} == {p.name for p in pieces_of(Layout(), 0)}
    assert all(one.within(None) for one in found)


def test_differences_are_counted_and_the_largest_is_found(tmp_path):
    def edit(pieces):
        for piece in pieces:
            if piece.name == "weight/layers.0.q" and piece.box.contains(Box((0, 0), (1, 4))):
                row = piece.data.view(-1)
                row[0] += 0.5
                row[1] += 0.25
        return pieces

    problems, different, _ = compare(saved(tmp_path / "a", Layout(tp=2)), saved(tmp_path / "b", Layout(), edit))
    assert problems == () and different.keys() == {"weight/layers.0.q"}
    one = different["weight/layers.0.q"]
    assert (one.num_different, one.num_incomparable) == (2, 0) and one.max_abs == pytest.approx(0.5, abs=1e-6)
    assert one.within(0.51) and not one.within(0.49) and not one.within(None)


def test_zeros_of_other_sign_differ_in_bits_only_and_nan_is_beyond_every_tolerance(tmp_path):
    def with_values(*values):
        def edit(pieces):
            for piece in pieces:
                if piece.name == "weight/layers.1.norm":
                    piece.data[: len(values)] = torch.tensor(values)
            return pieces

        return edit

    nan = math.nan
    first = saved(tmp_path / "a", Layout(), with_values(0.0, nan))
    zero = compare(first, saved(tmp_path / "b", Layout(), with_values(-0.0, nan)))[1]["weight/layers.1.norm"]
    assert (zero.num_different, zero.max_abs) == (1, 0.0) and zero.within(0.0) and not zero.within(None)
    bad = compare(first, saved(tmp_path / "c", Layout(), with_values(0.0, 1.0)))[1]["weight/layers.1.norm"]
    assert (bad.num_different, bad.num_incomparable) == (1, 1) and not bad.within(1e30)


def test_other_tensors_shapes_and_dtypes_are_named(tmp_path):
    def edit(pieces):
        kept = [p for p in pieces if p.name != "weight/layers.4.norm"]
        out = []
        for piece in kept:
            if piece.name == "weight/layers.3.norm":
                piece = type(piece)(piece.name, piece.global_shape, torch.bfloat16, piece.box, piece.data.bfloat16())
            if piece.name == "weight/final_scale":
                piece = type(piece)(piece.name, (1,), piece.dtype, Box((0,), (1,)), piece.data.view(1))
            out.append(piece)
        return out

    problems, different, found = compare(saved(tmp_path / "a", Layout()), saved(tmp_path / "b", Layout(), edit))
    assert problems == (
        "weight/final_scale: shape [] in the first, [1] in the second",
        "weight/layers.3.norm: dtype float32 in the first, bfloat16 in the second",
        "weight/layers.4.norm: only in the first",
    )
    assert different.keys() == {"weight/layers.3.norm"} and different["weight/layers.3.norm"].within(0.02)
    assert "weight/final_scale" not in {one.name for one in found}


def test_a_damaged_one_is_not_compared(tmp_path):
    first, second = saved(tmp_path / "a", Layout()), saved(tmp_path / "b", Layout(tp=2))
    shard = second / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointDamaged) as caught:
        compare(first, second)
    assert caught.value.file == str(shard)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 6), (3, 4, 5), (2, 0)])
@pytest.mark.parametrize("most", [1, 4, 1000])
def test_spans_hold_each_element_once_and_are_small(shape, most):
    boxes = list(spans_of(shape, most))
    assert all(box.numel <= most for box in boxes)
    assert covers(shape, boxes)


def test_any_box_of_a_global_tensor_can_be_read(tmp_path):
    checkpoint = saved(tmp_path, Layout(tp=2, dp=2))
    source = DiskSource(checkpoint)
    tensors = GlobalTensors(read_manifest(checkpoint), source)
    whole = values_of("weight/layers.2.down", (16, 24), torch.float32)
    for box in (Box((0, 0), (16, 24)), Box((3, 10), (5, 9)), Box((15, 23), (1, 1))):
        assert torch.equal(tensors.read("weight/layers.2.down", box), whole[box.slices])
    assert tensors.read("weight/final_scale", Box((), ())).item() == values_of("weight/final_scale", (), torch.float32)
    source.close()
