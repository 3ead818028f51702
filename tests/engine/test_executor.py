"""The executor: any number of stages and micro-batches gives the losses and gradients of one process, bit for bit."""

import pytest
import torch

from engine.pipeline.executor import run_step
from engine.pipeline.schedules import one_forward_one_backward
from engine.planning.layout import Layout
from tests.harness import groups_of, run_ranks
from tests.toy_stages import ACTIVATION, BATCH, SEQ, ToyStage, micro_batch, name_of

COUNTS = (1, 2, 3, 4, 5)


def _scale(count):
    return 1.0 / (count * BATCH * SEQ)


def _plain(rank, store):
    """Losses and gradients without executor or pipeline, by number of micro-batches."""
    results = {}
    for count in COUNTS:
        model = ToyStage(0, Layout())
        loss_sum = 0.0
        for number in range(count):
            loss = model(*micro_batch(0, number))
            (loss * _scale(count)).backward()
            loss_sum += loss.item()
        results[count] = loss_sum, {name_of(p): p.grad.numpy() for p in model.parameters()}
    return results


def _piped(rank, store, layout):
    groups = groups_of(layout, rank, store)
    results = {}
    for count in COUNTS:
        stage = ToyStage(groups.at.pp, layout)
        announced = []
        tokens_wanted, targets_wanted = groups.is_first_stage, groups.is_last_stage

        def batch(number, tokens_wanted=tokens_wanted, targets_wanted=targets_wanted):
            tokens, targets = micro_batch(0, number)
            return tokens if tokens_wanted else None, targets if targets_wanted else None

        def announce(stage=stage, announced=announced, count=count):
            # All but the last micro-batch have been through backward: gradients exist unless it is the only one.
            announced.append(all((p.grad is None) == (count == 1) for p in stage.parameters()))

        result = run_step(
            stage,
            one_forward_one_backward(groups.at.pp, layout.pp, count),
            groups,
            batch,
            activation_shape=ACTIVATION,
            dtype=torch.float32,
            device=torch.device("cpu"),
            loss_scale=_scale(count),
            before_last_backward=announce,
        )
        assert announced == [True]
        results[count] = result.loss_sum.item(), {name_of(p): p.grad.numpy() for p in stage.parameters()}
    return results


@pytest.fixture(scope="module")
def plain():
    return run_ranks(1, _plain)[0]


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(pp=3), Layout(pp=2, stage_layers=(1, 2))], ids=str)
def test_a_pipeline_computes_what_one_process_computes(layout, plain):
    stages = run_ranks(layout.world_size, _piped, layout)
    for count, (loss_sum, gradients) in plain.items():
        assert [results[count][0] for results in stages] == [0.0] * (layout.pp - 1) + [loss_sum]
        piped = {name: value for results in stages for name, value in results[count][1].items()}
        assert piped.keys() == gradients.keys()
        for name, value in gradients.items():
            assert (piped[name] == value).all(), (count, name)
