"""The order of samples: a bijection for every size, different for every epoch and seed, shuffled well, and pinned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.order import permute, samples_of_step


def whole(num_samples: int, seed: int = 1, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(num_samples, dtype=np.int64), num_samples, seed, epoch)


def is_bijection(values: np.ndarray) -> bool:
    return np.array_equal(np.sort(values), np.arange(values.size))


def test_a_bijection_for_every_size_up_to_5000():
    assert all(is_bijection(whole(size, seed=size)) for size in range(1, 5001))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20_000), st.integers(0, 1 << 63), st.integers(0, 1 << 40))
def test_a_bijection_for_any_seed_and_epoch(num_samples, seed, epoch):
    assert is_bijection(whole(num_samples, seed, epoch))


@pytest.mark.parametrize("num_samples", [65_535, 65_536, 65_537, 99_991, 300_000])
def test_a_bijection_for_large_sizes(num_samples):
    assert is_bijection(whole(num_samples))


@pytest.mark.parametrize("num_samples", [(1 << 31) + 11, (1 << 40) - 1, 10**15 + 37, 1 << 62])
def test_huge_sizes_stay_inside_and_give_no_sample_twice(num_samples):
    indices = np.concatenate([np.arange(5000), num_samples - 1 - np.arange(5000)])
    values = permute(indices, num_samples, 7, 0)
    assert values.min() >= 0
    assert values.max() < num_samples
    assert np.unique(values).size == indices.size


@pytest.mark.parametrize("num_samples", [0, -1, (1 << 62) + 1])
def test_an_impossible_size_is_refused(num_samples):
    with pytest.raises(ValueError, match="num_samples"):
        permute(np.zeros(1, np.int64), num_samples, 1, 0)


def test_an_index_maps_alike_alone_and_among_others():
    together = whole(777)
    assert all(permute(np.array([i]), 777, 1, 0)[0] == together[i] for i in range(0, 777, 13))


def test_epochs_and_seeds_differ():
    orders = [whole(500, seed, epoch) for seed in range(4) for epoch in range(4)]
    for i, first in enumerate(orders):
        for second in orders[i + 1 :]:
            # Two independent orders agree in one place on average.
            assert np.count_nonzero(first == second) < 10


@pytest.mark.parametrize("num_samples", [1000, 1024, 4099])
def test_shuffled_well(num_samples):
    """Means over 40 epochs of statistics whose distribution under a uniform shuffle is known, within five sigma."""
    epochs = 40
    orders = np.stack([whole(num_samples, 3, epoch) for epoch in range(epochs)])
    n = num_samples
    # Rank correlation of place and sample: mean 0, variance 1 / (n - 1).
    places = np.arange(n) - (n - 1) / 2
    correlation = ((orders - (n - 1) / 2) @ places) / (places @ places)
    assert abs(correlation.mean()) < 5 / np.sqrt((n - 1) * epochs)
    # The same for neighbours.
    following = [np.corrcoef(order[:-1], order[1:])[0, 1] for order in orders]
    assert abs(np.mean(following) + 1 / n) < 5 / np.sqrt(n * epochs)
    # Fixed points: Poisson with mean 1.
    assert abs(np.count_nonzero(orders == np.arange(n)) - epochs) < 5 * np.sqrt(epochs)
    # Ascents: mean (n - 1) / 2, variance (n + 1) / 12.
    ascents = np.count_nonzero(np.diff(orders) > 0, axis=1)
    assert abs(ascents.mean() - (n - 1) / 2) < 5 * np.sqrt((n + 1) / 12 / epochs)


def test_every_sample_comes_to_every_place():
    """Of ten samples over 5000 epochs each (place, sample) pair has its tenth: chi squared, 81 degrees of freedom."""
    orders = np.stack([whole(10, 5, epoch) for epoch in range(5000)])
    counts = np.array([[np.count_nonzero(orders[:, place] == sample) for sample in range(10)] for place in range(10)])
    chi_squared = ((counts - 500) ** 2 / 500).sum()
    assert chi_squared < 150  # p = 5e-6


def test_steps_partition_each_epoch():
    size, batch = 100, 8
    taken = np.concatenate([samples_of_step(step, batch, size, 5) for step in range(25)])
    assert is_bijection(taken[:100])
    assert is_bijection(taken[100:200])
    assert not np.array_equal(taken[:100], taken[100:])
    crossing = samples_of_step(12, batch, size, 5)
    assert np.array_equal(crossing[:4], whole(size, 5, 0)[96:])
    assert np.array_equal(crossing[4:], whole(size, 5, 1)[:4])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(1, 40), st.integers(0, 200))
def test_a_step_is_a_window_of_the_endless_sequence(num_samples, batch, step):
    epochs = ((step + 1) * batch - 1) // num_samples + 1
    endless = np.concatenate([whole(num_samples, 9, epoch) for epoch in range(epochs)])
    assert np.array_equal(samples_of_step(step, batch, num_samples, 9), endless[step * batch : (step + 1) * batch])


def test_the_global_batch_size_only_moves_the_borders():
    fine = np.concatenate([samples_of_step(step, 2, 33, 1) for step in range(60)])
    coarse = np.concatenate([samples_of_step(step, 24, 33, 1) for step in range(5)])
    assert np.array_equal(fine, coarse)


def test_the_order_is_pinned():
    """Running jobs depend on these values."""
    assert whole(10, 1234, 0).tolist() == [2, 8, 5, 0, 1, 3, 6, 7, 9, 4]
    assert samples_of_step(1000, 8, 10_007, 1234).tolist() == [6840, 3852, 7482, 7291, 2347, 1752, 3090, 2101]
