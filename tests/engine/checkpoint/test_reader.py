"""Any part of any stored box comes out right, for few bytes more than were asked for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint import reader as reader_module
from engine.checkpoint.boxes import Box, flat_range_boxes
from engine.checkpoint.errors import CheckpointDamaged
from engine.checkpoint.load import load_checkpoint
from engine.checkpoint.pieces import Piece
from engine.checkpoint.reader import Reader
from engine.checkpoint.shard import plan_shard, write_shard
from engine.checkpoint.sources import DiskSource
from engine.planning.layout import Layout
from tests.engine.checkpoint.synthetic import assert_right, filled, good, load_all, save_all, values_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool]


@st.composite
def box_and_part(draw):
    size = tuple(draw(st.lists(st.integers(1, 40), min_size=0, max_size=3)))
    offset, part = [], []
    for extent in size:
        start = draw(st.integers(0, extent - 1))
        offset.append(start)
        part.append(draw(st.integers(1, extent - start)))
    return size, Box(tuple(offset), tuple(part))


@given(box_and_part(), st.sampled_from(DTYPES), st.integers(1, 50), st.integers(1, 3000), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_part_of_a_box_in_chunks_of_any_size(tmp_path_factory, case, dtype, chunk_elements, span_bytes, strided):
    size, part = case
    directory = tmp_path_factory.mktemp("box")
    data = (torch.randn(size) * 50).to(dtype)
    piece = Piece("weight/x", size, dtype, Box.whole(size), data)
    patch = pytest.MonkeyPatch()
    patch.setattr("engine.checkpoint.shard.chunk_bytes_of", lambda size, itemsize: chunk_elements * itemsize)
    patch.setattr(reader_module, "SPAN_BYTES", span_bytes)
    try:
        file = write_shard(plan_shard([piece], {}), directory / "shard")
        # A target that is a part of something wider, or memory of its own.
        room = torch.zeros([*part.size[:-1], part.size[-1] + 3 if part.size else 1], dtype=dtype)
        target = (
            (room[..., : part.size[-1]] if part.size else room[0]) if strided else torch.zeros(part.size, dtype=dtype)
        )
        source = DiskSource(directory)
        Reader(source, {"shard": file}).read("shard", file.boxes[0], part, target)
        assert torch.equal(target, data[part.slices])
        Reader(source, {"shard": file}).check("shard", file.boxes[0])
        source.close()
    finally:
        patch.undo()


@given(st.integers(0, 2**32), box_and_part())
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_is_found_when_it_is_read(tmp_path_factory, position, case):
    size, part = case
    directory = tmp_path_factory.mktemp("box")
    piece = Piece("weight/x", size, torch.float32, Box.whole(size), torch.randn(size))
    file = write_shard(plan_shard([piece], {}), directory / "shard")
    entry = file.boxes[0]
    element = torch.arange(math.prod(size)).reshape(size)[part.slices].reshape(-1)
    at = entry.start + 4 * int(element[position % element.numel()]) + position % 4
    raw = bytearray((directory / "shard").read_bytes())
    raw[at] ^= 1 << (position % 8)
    (directory / "shard").write_bytes(raw)
    source = DiskSource(directory)
    with pytest.raises(CheckpointDamaged, match=str(directory / "shard")):
        Reader(source, {"shard": file}).read("shard", entry, part, torch.zeros(part.size))
    source.close()


def shares(shape, world, how):
    """How ``world`` ranks share a matrix: by rows, by columns, or by flat ranges that end anywhere."""
    rows, columns = shape
    for rank in range(world):
        if how == "rows":
            boxes = [Box((rank * rows // world, 0), (rows // world, columns))]
        elif how == "columns":
            boxes = [Box((0, rank * columns // world), (rows, columns // world))]
        else:
            each = math.prod(shape) // world + 5
            boxes = [b for b, _ in flat_range_boxes(shape, rank * each, min((rank + 1) * each, math.prod(shape)))]
        yield [Piece("weight/x", shape, torch.float32, b, torch.full(b.size, float("nan"))) for b in boxes]


@pytest.mark.parametrize(("save_as", "load_as"), [("rows", "columns"), ("columns", "rows"), ("flat", "flat")])
@pytest.mark.parametrize("shape", [(512, 4096), (1024, 2048)], ids=str)
def test_bytes_read_stay_close_to_bytes_needed(tmp_path, shape, save_as, load_as):
    directory = save_all(tmp_path, Layout(dp=2), [filled(p) for p in shares(shape, 2, save_as)])
    states = list(shares(shape, 4, load_as))
    results = good(load_all(directory, states))
    for pieces in states:
        assert_right(pieces)
    assert sum(r.bytes_needed for r in results) == 4 * math.prod(shape)
    assert sum(r.bytes_read for r in results) <= 1.05 * 4 * math.prod(shape)


def test_parameters_that_require_gradients_are_written_in_place(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    piece = Piece("weight/x", (3, 4), torch.float32, Box.whole((3, 4)), parameter)
    saved = save_all(
        tmp_path, Layout(), [filled([Piece("weight/x", (3, 4), torch.float32, piece.box, torch.zeros(3, 4))])]
    )
    before = parameter.data_ptr()
    load_checkpoint([piece], saved)
    assert parameter.data_ptr() == before
    assert torch.equal(parameter.detach(), values_of("weight/x", (3, 4), torch.float32))
