"""The learning rate at every corner of the schedule."""

import pytest

from engine.planning.config import TrainConfig
from engine.planning.schedule import learning_rate


def _train(**settings):
    return TrainConfig(
        **{
            "sequence_length": 8,
            "global_batch_size": 1,
            "train_steps": 40,
            "lr": 1e-3,
            "min_lr": 1e-4,
            "warmup_steps": 10,
            **settings,
        }
    )


def test_warm_up_rises_to_the_peak_in_equal_parts():
    rates = [learning_rate(step, _train()) for step in range(10)]
    assert rates == pytest.approx([1e-4 * (step + 1) for step in range(10)])
    assert rates[-1] == 1e-3


def test_cosine_from_the_peak_through_the_middle_to_the_minimum():
    train = _train()
    assert learning_rate(10, train) == pytest.approx(1e-3)
    assert learning_rate(15, train) == pytest.approx(1e-4 + 9e-4 * (2 + 3**0.5) / 4)  # cosine of 30 degrees
    assert learning_rate(25, train) == pytest.approx((1e-3 + 1e-4) / 2)
    assert learning_rate(39, train) > 1e-4
    for step in (40, 41, 1000):
        assert learning_rate(step, train) == 1e-4
    rates = [learning_rate(step, train) for step in range(10, 41)]
    assert rates == sorted(rates, reverse=True)


def test_decay_steps_end_the_cosine_before_or_after_the_run():
    assert learning_rate(20, _train(decay_steps=20)) == 1e-4
    assert learning_rate(40, _train(decay_steps=100)) > 5e-4


def test_no_warm_up_starts_at_the_peak_and_warm_up_alone_ends_at_the_minimum():
    assert learning_rate(0, _train(warmup_steps=0)) == 1e-3
    train = _train(warmup_steps=40)
    assert learning_rate(39, train) == 1e-3
    assert learning_rate(40, train) == 1e-4
