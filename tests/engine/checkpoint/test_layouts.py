"""State saved in one layout is loaded in every other, bit by bit, and comes back as the same bytes."""

import hashlib

import pytest
import torch

from engine.checkpoint.boxes import covers
from engine.checkpoint.load import read_pieces
from engine.checkpoint.manifest import read_manifest
from engine.checkpoint.sources import DiskSource
from engine.checkpoint.verify import verify
from engine.planning.layout import Layout
from tests.engine.checkpoint.synthetic import (
    KINDS,
    MODEL,
    assert_right,
    filled,
    good,
    load_all,
    pieces_of,
    save_all,
    whole,
)

LAYOUTS = [
    (Layout(), False),
    (Layout(tp=2), False),
    (Layout(tp=4), False),
    (Layout(pp=2), False),
    (Layout(pp=3), False),
    (Layout(pp=2, stage_layers=(1, 4)), False),
    (Layout(dp=2), False),
    (Layout(dp=3), False),
    (Layout(dp=3), True),
    (Layout(dp=8), False),
    (Layout(tp=2, pp=2), False),
    (Layout(tp=2, dp=2), True),
    (Layout(pp=5, dp=1), False),
    (Layout(pp=2, dp=3), True),
    (Layout(tp=2, pp=2, dp=2), False),
    (Layout(tp=4, dp=2), False),
]


def state(layout, uneven):
    return [pieces_of(layout, rank, uneven) for rank in range(layout.world_size)]


def digests(directory):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.glob("*.safetensors")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directories = []
    for number, (layout, uneven) in enumerate(LAYOUTS):
        states = [filled(pieces) for pieces in state(layout, uneven)]
        directories.append(save_all(tmp_path_factory.mktemp(f"layout{number}"), layout, states))
    return directories


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[f"{la}{'~' * u}" for la, u in LAYOUTS])
def test_state_of_one_layout_is_bit_equal_in_every_other(saved, number):
    manifest = read_manifest(saved[number])
    for layout, uneven in LAYOUTS:
        for pieces in state(layout, uneven):
            source = DiskSource(saved[number])
            read_pieces(pieces, manifest, source)
            source.close()
            assert_right(pieces)


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[f"{la}{'~' * u}" for la, u in LAYOUTS])
def test_there_and_back_gives_the_same_bytes(saved, tmp_path, number):
    other = (number * 5 + 3) % len(LAYOUTS)
    origin, (layout, uneven) = saved[number], LAYOUTS[number]
    states = state(*LAYOUTS[other])
    good(load_all(origin, states))
    there = save_all(tmp_path / "there", LAYOUTS[other][0], states)
    assert digests(there) == digests(saved[other])
    back = state(layout, uneven)
    good(load_all(there, back))
    assert digests(save_all(tmp_path / "back", layout, back)) == digests(origin)


def test_a_checkpoint_has_each_element_once_without_padding_and_unfused(saved):
    shapes = {
        name.partition("/")[2]: entry.shape
        for name, entry in read_manifest(saved[0]).tensors.items()
        if name.startswith("weight/")
    }
    assert shapes["embedding"] == (MODEL.vocab_size, MODEL.hidden_size)
    assert shapes["final_scale"] == ()
    assert {"layers.4.q", "layers.4.k", "layers.4.v", "layers.4.gate", "layers.4.up"} <= shapes.keys()
    elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    for directory in saved:
        manifest = read_manifest(directory)
        assert manifest.tensors.keys() == {f"{kind}/{name}" for kind in KINDS for name in shapes}
        for name, stored in manifest.boxes_by_tensor().items():
            assert covers(manifest.tensors[name].shape, [entry.box for _, entry in stored])
        data = sum(box.num_bytes for file in manifest.files.values() for box in file.boxes)
        assert data == elements * sum(dtype.itemsize for dtype in KINDS.values())
        assert verify(directory) == []


def test_one_process_can_take_the_whole_model(saved):
    manifest = read_manifest(saved[-1])
    pieces = [whole(name, t.shape, getattr(torch, t.dtype)) for name, t in manifest.tensors.items()]
    (result,) = good(load_all(saved[-1], [pieces]))
    assert_right(pieces)
    assert result.bytes_needed == sum(p.data.nbytes for p in pieces)


def test_ranks_that_own_nothing_write_no_file(tmp_path):
    layout = Layout(dp=4)
    states = [[filled([whole("weight/scale", ())])[0]] if rank == 2 else [] for rank in range(4)]
    directory = save_all(tmp_path, layout, states)
    assert sorted(p.name for p in directory.iterdir()) == ["manifest.json", "shard-00002.safetensors"]
    fresh = [[whole("weight/scale", ())] if rank == 3 else [] for rank in range(4)]
    good(load_all(directory, fresh))
    assert_right(fresh[3])
