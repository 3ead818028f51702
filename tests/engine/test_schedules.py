"""1F1B action lists: complete, bounded in memory, free of deadlock, and torch's own order where torch accepts it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pipeline.executor import _GRADIENT_SENDS_KEPT
from engine.pipeline.schedules import Action, one_forward_one_backward

pipelines = st.tuples(st.integers(1, 9), st.integers(1, 20))


def _lists(num_stages, num_microbatches):
    return [one_forward_one_backward(stage, num_stages, num_microbatches) for stage in range(num_stages)]


@given(pipelines)
def test_each_micro_batch_goes_forward_once_and_then_backward_once(pipeline):
    _, num_microbatches = pipeline
    for actions in _lists(*pipeline):
        for kind in "FB":
            order = [a.microbatch for a in actions if a.kind == kind]
            assert order == list(range(num_microbatches))
        for microbatch in range(num_microbatches):
            assert actions.index(Action("F", microbatch)) < actions.index(Action("B", microbatch))


@given(pipelines)
def test_a_stage_holds_at_most_as_many_micro_batches_as_there_are_stages_from_it_on(pipeline):
    num_stages, _ = pipeline
    for stage, actions in enumerate(_lists(*pipeline)):
        held = most = 0
        for action in actions:
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
        assert held == 0
        assert most <= num_stages - stage


def _needs(action, stage, num_stages, kept):
    """What has to be done before ``action`` can be: its input, and the arrival of gradients sent ``kept`` before it."""
    source = stage - 1 if action.kind == "F" else stage + 1
    if 0 <= source < num_stages:
        yield source, action
    if action.kind == "B" and stage > 0 and action.microbatch >= kept:
        yield stage - 1, Action("B", action.microbatch - kept)


@given(pipelines)
def test_blocking_receives_and_at_most_two_gradients_under_way_never_deadlock(pipeline):
    num_stages, _ = pipeline
    lists = _lists(*pipeline)
    position = [0] * num_stages
    done = set()
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(lists):
            while position[stage] < len(actions):
                action = actions[position[stage]]
                if not done.issuperset(_needs(action, stage, num_stages, _GRADIENT_SENDS_KEPT)):
                    break
                done.add((stage, action))
                position[stage] += 1
                moved = True
    assert position == [len(actions) for actions in lists]


@given(pipelines)
def test_the_two_ends_of_a_link_use_it_in_the_same_order(pipeline):
    """What a stage sends one way arrives in the order in which the neighbour asks for it."""
    num_stages, _ = pipeline
    lists = _lists(*pipeline)
    for stage in range(num_stages - 1):
        for kind in "FB":
            assert [a for a in lists[stage] if a.kind == kind] == [a for a in lists[stage + 1] if a.kind == kind]


def test_the_last_stage_alternates_and_fewer_micro_batches_than_stages_shorten_the_warm_up():
    assert [str(a) for a in one_forward_one_backward(1, 2, 3)] == ["F0", "B0", "F1", "B1", "F2", "B2"]
    assert [str(a) for a in one_forward_one_backward(0, 2, 3)] == ["F0", "F1", "B0", "F2", "B1", "B2"]
    assert [str(a) for a in one_forward_one_backward(0, 4, 2)] == ["F0", "F1", "B0", "B1"]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 2), (2, 5), (3, 4), (4, 4), (4, 9)])
def test_the_order_is_that_of_torch_pipelining(num_stages, num_microbatches):
    from torch.distributed.pipelining.schedules import FORWARD, _get_1f1b_rank_ops

    for stage, actions in enumerate(_lists(num_stages, num_microbatches)):
        warmup = min(num_stages - 1 - stage, num_microbatches)
        theirs = _get_1f1b_rank_ops(
            1, num_stages, warmup, num_microbatches - warmup, warmup, stage, lambda *_: 0, lambda *_: 0
        )
        order = [f"{'F' if op.computation_type is FORWARD else 'B'}{op.microbatch_index}" for op in theirs if op]
        assert order == [str(a) for a in actions]


@pytest.mark.parametrize(("stage", "num_stages", "num_microbatches"), [(2, 2, 1), (-1, 2, 1), (0, 1, 0)])
def test_what_cannot_be_run_is_refused(stage, num_stages, num_microbatches):
    with pytest.raises(ValueError, match=r"stage|num_microbatches"):
        one_forward_one_backward(stage, num_stages, num_microbatches)
