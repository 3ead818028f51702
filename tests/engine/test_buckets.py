"""Buckets: gradients accumulate in flat fp32, leave while backward runs, in one order, and add up over replicas."""

import pytest
import torch

from engine.data_parallel.buckets import ALIGNMENT, ParameterBuckets
from engine.parameters import ParameterSpec, Segment, attach
from engine.pipeline.executor import run_step
from engine.pipeline.schedules import one_forward_one_backward
from engine.planning.layout import Layout
from tests.harness import groups_of, run_ranks
from tests.toy_stages import ACTIVATION, BATCH, SEQ, ToyStage, micro_batch, name_of

TINY = 1e-4
"""Bucket size in MiB at which every parameter of the toy has a bucket of its own or shares it with one other."""


def _build(groups, *, bucket_size_mb=TINY, **kwargs):
    stage = ToyStage(groups.at.pp, groups.layout, **kwargs)
    buckets = ParameterBuckets(stage.in_order(), groups, bucket_size_mb=bucket_size_mb, trace=[])
    return stage, buckets


def _step(groups, stage, buckets, num_microbatches, dtype=torch.float32):
    mine = groups.layout.microbatches_of_replica(groups.at.dp, num_microbatches)
    run_step(
        stage,
        one_forward_one_backward(groups.at.pp, groups.layout.pp, len(mine)),
        groups,
        [micro_batch(0, number) for number in mine],
        activation_shape=ACTIVATION,
        dtype=dtype,
        device=torch.device("cpu"),
        loss_scale=1.0 / (num_microbatches * BATCH * SEQ),
        before_last_backward=buckets.arm,
    )
    buckets.finish()


def _shards(buckets):
    """The reduced gradients that this rank holds: name -> (offset in the parameter, values)."""
    held = {}
    for bucket in buckets.buckets:
        for slot in bucket.slots:
            start, stop = max(slot.start, bucket.shard.start), min(slot.stop, bucket.shard.stop)
            if start < stop:
                held[name_of(slot.parameter)] = start - slot.start, bucket.gradients[start:stop].numpy().copy()
    return held


def _gradients(rank, store, layout, num_microbatches, tied):
    groups = groups_of(layout, rank, store)
    stage, buckets = _build(groups, tied=tied)
    shards = []
    for _ in range(2):  # a second step starts from zero again
        _step(groups, stage, buckets, num_microbatches)
        shards.append(_shards(buckets))
        buckets.zero_gradients()
    assert shards[0].keys() == shards[1].keys()
    assert all((a[1] == b[1]).all() for a, b in zip(shards[0].values(), shards[1].values(), strict=True))
    return shards[0]


@pytest.mark.parametrize(
    ("layout", "num_microbatches", "tied"),
    [
        (Layout(dp=2), 4, False),
        (Layout(dp=3), 5, False),  # two, two and one micro-batch
        (Layout(pp=2, dp=2), 3, False),  # two and one, fewer micro-batches than stages
        (Layout(pp=3), 2, True),
        (Layout(pp=2, dp=2), 3, True),
        (Layout(dp=2), 2, True),
    ],
    ids=lambda value: str(value),
)
def test_shards_of_all_ranks_are_the_gradient_of_the_whole_batch(layout, num_microbatches, tied):
    (whole,) = run_ranks(1, _gradients, Layout(), num_microbatches, tied)
    ranks = run_ranks(layout.world_size, _gradients, layout, num_microbatches, tied)
    for name, (_, expected) in whole.items():
        parts = sorted((part for held in ranks for n, part in held.items() if n == name), key=lambda part: part[0])
        copies = 2 if tied and layout.pp > 1 and name == "embedding" else 1
        assert sum(len(values) for _, values in parts) == copies * len(expected)
        for offset, values in parts:
            torch.testing.assert_close(
                torch.from_numpy(values),
                torch.from_numpy(expected[offset : offset + len(values)]),
                rtol=1e-5,
                atol=1e-8,
            )
        if copies == 2:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            assert all(a[0] == b[0] and (a[1] == b[1]).all() for a, b in pairs), "the two copies differ"


def _trace(rank, store, unused):
    groups = groups_of(Layout(dp=2), rank, store)
    stage, buckets = _build(groups, unused=unused)
    _step(groups, stage, buckets, 4)
    if unused:
        slots = [slot for bucket in buckets.buckets for slot in bucket.slots if slot.parameter is stage.unused]
        assert not stage.unused.grad.any() and len(slots) == 1
    return [(event, bucket) for event, bucket, _ in buckets.trace], len(buckets.buckets)


def test_buckets_are_on_their_way_before_backward_has_ended_in_one_order():
    for events, count in run_ranks(2, _trace, False):
        assert count > 3
        assert events == [
            *(("launched", bucket) for bucket in range(count)),
            ("backward_ended", -1),
            *(("reduced", bucket) for bucket in range(count)),
        ]


def test_a_parameter_without_a_gradient_holds_up_its_bucket_and_stalls_nothing():
    for events, count in run_ranks(2, _trace, True):
        ended = events.index(("backward_ended", -1))
        assert 1 <= ended < count
        assert [bucket for event, bucket in events if event == "launched"] == list(range(count))
        assert [bucket for event, bucket in events if event == "reduced"] == list(range(count))


def _bf16(rank, store):
    groups = groups_of(Layout(), rank, store)
    stage, buckets = _build(groups, dtype=torch.bfloat16)
    expected = {}
    twin = ToyStage(0, Layout(), dtype=torch.bfloat16)
    for number in range(6):
        (twin(*micro_batch(0, number)) * (1.0 / (6 * BATCH * SEQ))).backward()
        for parameter in twin.parameters():
            total = expected.setdefault(name_of(parameter), torch.zeros(parameter.numel()))
            total += parameter.grad.float().flatten()
            parameter.grad = None
    _step(groups, stage, buckets, 6, torch.bfloat16)
    assert all(bucket.gradients.dtype == torch.float32 for bucket in buckets.buckets)
    assert all(parameter.grad is None for parameter in stage.parameters())
    held = _shards(buckets)
    return all((held[name][1] == total.numpy()).all() for name, total in expected.items())


def test_bf16_gradients_are_summed_in_fp32():
    assert run_ranks(1, _bf16) == [True]


def _places(rank, store, layout):
    shapes = [(3, 5), (7,), (100, 64), (2, 2)]
    parameters = []
    for number, shape in enumerate(shapes):
        values = torch.full(shape, float("nan"))
        values[:-1] = 1.0
        segment = Segment(str(number), shape, (0,) * len(shape), (shape[0] - 1, *shape[1:]), 0, "zeros")
        parameters.append(attach(torch.nn.Parameter(values), ParameterSpec(shape, (segment,))))
    buckets = ParameterBuckets(parameters, groups_of(layout, rank, store), bucket_size_mb=100 * 4 / 2**20)
    for bucket in buckets.buckets:
        assert len(bucket.parameters) == len(bucket.gradients) == layout.dp * (bucket.shard.stop - bucket.shard.start)
        assert bucket.shard.start == rank * len(bucket.parameters) // layout.dp
        assert bucket.shard.start % ALIGNMENT == 0
        filled = torch.zeros(len(bucket.parameters), dtype=torch.bool)
        for slot in bucket.slots:
            assert slot.start % ALIGNMENT == 0
            assert slot.parameter.data_ptr() == bucket.parameters[slot.start :].data_ptr()
            assert slot.parameter.shape == slot.spec.shape
            assert not slot.parameter[-1].any()
            filled[slot.start : slot.stop - slot.parameter[0].numel()] = True
        assert bucket.parameters.tolist() == filled.float().tolist()
    return [[name_of(slot.parameter) for slot in bucket.slots] for bucket in buckets.buckets]


def test_buckets_lie_in_reverse_order_of_use_aligned_evenly_cut_and_zero_where_nothing_is():
    assert run_ranks(3, _places, Layout(dp=3)) == [[["3"], ["2"], ["1", "0"]]] * 3
