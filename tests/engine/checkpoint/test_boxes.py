"""Box arithmetic against arrays that simply mark their elements."""

import math
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.boxes import Box, covers, first_gap, flat_range_boxes, flat_start

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape):
    offset, size = [], []
    for extent in shape:
        start = draw(st.integers(0, extent - 1))
        offset.append(start)
        size.append(draw(st.integers(1, extent - start)))
    return Box(tuple(offset), tuple(size))


@st.composite
def shape_and_boxes(draw, max_boxes=6):
    shape = draw(shapes)
    return shape, draw(st.lists(boxes_in(shape), max_size=max_boxes))


def marks(shape, boxes):
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[box.slices] += 1
    return counts


@given(st.data(), shapes)
def test_a_flat_range_is_cut_into_boxes_in_order(data, shape):
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers = np.arange(total).reshape(shape)
    seen = []
    for box, at in flat_range_boxes(shape, start, stop):
        assert at == flat_start(box, shape)
        values = numbers[box.slices].ravel().tolist()
        assert values == list(range(at, at + box.numel)), "contiguous in memory"
        seen += values
    assert seen == list(range(start, stop))
    assert len(list(flat_range_boxes(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


def test_a_matrix_needs_at_most_three_boxes_and_a_scalar_one():
    assert list(flat_range_boxes((5, 4), 3, 18)) == [
        (Box((0, 3), (1, 1)), 3),
        (Box((1, 0), (3, 4)), 4),
        (Box((4, 0), (1, 2)), 16),
    ]
    assert list(flat_range_boxes((), 0, 1)) == [(Box((), ()), 0)]
    assert list(flat_range_boxes((5, 4), 7, 7)) == []
    with pytest.raises(ValueError, match="not inside"):
        list(flat_range_boxes((5, 4), 3, 21))


@given(shape_and_boxes(max_boxes=2).filter(lambda x: len(x[1]) == 2))
def test_intersection_and_change_of_coordinates(case):
    shape, (a, b) = case
    both = (marks(shape, [a]) > 0) & (marks(shape, [b]) > 0)
    common = a.intersect(b)
    assert common == b.intersect(a)
    if common is None:
        assert not both.any()
        return
    assert (marks(shape, [common]) == both).all()
    assert a.contains(common) and b.contains(common)
    assert common.relative_to(a).shifted(a.offset) == common
    numbers = np.arange(math.prod(shape)).reshape(shape)
    assert (numbers[a.slices][common.relative_to(a).slices] == numbers[common.slices]).all()


@given(shape_and_boxes())
def test_coverage(case):
    shape, boxes = case
    counts = marks(shape, boxes)
    assert covers(shape, boxes) == bool((counts == 1).all())
    assert covers(shape, boxes, exactly_once=False) == bool((counts >= 1).all())
    gap = first_gap(shape, boxes)
    assert (gap is None) == bool((counts >= 1).all())
    if gap is not None:
        assert (counts[gap.slices] == 0).all()


@given(st.data(), shapes.filter(lambda s: math.prod(s) > 1))
def test_a_cut_into_flat_ranges_covers_exactly_and_misses_when_one_is_left_out(data, shape):
    total = math.prod(shape)
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=5))})
    boxes = [box for a, b in pairwise(cuts) for box, _ in flat_range_boxes(shape, a, b)]
    assert covers(shape, boxes)
    assert not covers(shape, [*boxes, boxes[0]])
    assert covers(shape, [*boxes, boxes[0]], exactly_once=False)
    left_out = data.draw(st.sampled_from(boxes))
    assert not covers(shape, [b for b in boxes if b != left_out], exactly_once=False)


def test_boxes_outside_the_tensor_do_not_cover_it():
    assert not covers((2, 2), [Box((0, 0), (2, 3))])
    assert covers((0, 3), [])
    with pytest.raises(ValueError, match="no box"):
        Box((0,), (0,))


def test_thousands_of_boxes_are_checked_quickly():
    rows, columns, tp, dp = 8192, 1024, 16, 128
    boxes = []
    for t in range(tp):
        width = columns // tp
        total = rows * width
        each = -(-total // dp) + 3
        for d in range(dp):
            for box, _ in flat_range_boxes((rows, width), min(d * each, total), min((d + 1) * each, total)):
                boxes.append(box.shifted((0, t * width)))
    assert len(boxes) > 5000
    start = time.perf_counter()
    assert covers((rows, columns), boxes)
    assert first_gap((rows, columns), boxes[:-1]) == boxes[-1]
    assert time.perf_counter() - start < 3.0
