"""fp16: an overflow skips the update on all ranks alike, and a restart goes on with the very scale and counters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checkpoint.manifest import read_manifest
from engine.data_parallel.loss_scaler import LossScaler
from engine.planning.config import LossScaleConfig, TrainConfig
from engine.planning.layout import Layout
from engine.planning.schedule import learning_rate
from tests.harness import run_ranks
from tests.toy_stages import settings
from tests.toy_training import Replica, whole_state
from tests.training import newest_checkpoint, tiny_run, train

SCALING = LossScaleConfig(initial=64.0, growth_interval=3, growth_factor=4.0, backoff_factor=0.5, minimum=16.0)


def test_the_scale_grows_after_good_steps_and_shrinks_at_an_overflow():
    scaler = LossScaler.initial(SCALING)
    trail = []
    for overflow in (False, False, False, True, False, False, True, True, False, False, False):
        scaler = scaler.after(overflow=overflow)
        trail.append((scaler.scale, scaler.good_steps))
    assert trail == [
        (64, 1), (64, 2), (256, 0), (128, 0), (128, 1), (128, 2), (64, 0), (32, 0), (32, 1), (32, 2), (128, 0),
    ]  # fmt: skip
    assert LossScaler.restored(SCALING, scaler.state()) == scaler


def test_an_overflow_at_the_smallest_scale_is_an_error():
    scaler = LossScaler.initial(SCALING)
    for _ in range(2):
        scaler = scaler.after(overflow=True)
    assert scaler.scale == 16
    with pytest.raises(FloatingPointError, match=r"train\.loss_scale\.minimum 16"):
        scaler.after(overflow=True)


def test_settings_that_would_be_ignored_or_cannot_be_are_refused():
    sizes = {"sequence_length": 8, "global_batch_size": 8, "train_steps": 1}
    for precision in ("fp32", "bf16"):
        with pytest.raises(ValueError, match=f"loss_scale is for precision fp16, not {precision}"):
            TrainConfig(**sizes, precision=precision, loss_scale=SCALING)
        assert TrainConfig(**sizes, precision=precision).scaling is None
    assert TrainConfig(**sizes, precision="fp16").scaling == LossScaleConfig()
    with pytest.raises(ValueError, match=r"initial 8 is below minimum 16"):
        LossScaleConfig(initial=8.0, minimum=16.0)


# The toy: gradients of which one rank's overflows.


def _forced(rank, store, layout, overflows):
    """The toy in fp32 with fp16's scaler, which then only has to scale: compare with the same run without it."""
    replica = Replica(rank, store, layout, settings(precision="fp16", loss_scale=SCALING, clip_grad=0.9))
    seen = []
    for step in range(8):
        scale = replica.optimizer.loss_scale
        replica.backward(step, loss_scale=scale)
        if step in overflows and rank == layout.world_size - 1:
            bucket = replica.buckets.buckets[0]
            bucket.gradients[bucket.shard][0] = float("inf" if step % 2 else "nan")
        norm, _ = replica.optimizer.step(1e-2)
        seen.append((scale, norm if step not in overflows else None, replica.optimizer.num_updates))
    return seen, replica.state()


def _unscaled(rank, store, layout, skipped):
    replica = Replica(rank, store, layout, settings(clip_grad=0.9))
    norms = []
    for step in range(8):
        if step in skipped:
            continue
        replica.backward(step)
        norms.append(replica.optimizer.step(1e-2)[0])
    return norms, replica.state()


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=3), Layout(pp=2, dp=2)], ids=str)
def test_a_forced_overflow_on_one_rank_skips_the_update_on_all(layout):
    """A scale that is a power of two changes no bit, so the run is bit-equal to one that never tried those steps."""
    overflows = (2, 6, 7)
    ranks = run_ranks(layout.world_size, _forced, layout, overflows)
    expected = run_ranks(layout.world_size, _unscaled, layout, overflows)
    for seen, _ in ranks:
        assert [scale for scale, *_ in seen] == [64, 64, 64, 32, 32, 32, 128, 64]
        assert [updates for *_, updates in seen] == [1, 2, 2, 3, 4, 5, 5, 5]
        assert [norm for _, norm, _ in seen if norm is not None] == expected[0][0]
    state, twin = (whole_state([pieces for _, pieces in found]) for found in (ranks, expected))
    assert state.keys() == twin.keys()
    for name, values in state.items():
        assert torch.equal(values, twin[name]), name


# The model in fp16, through checkpoints.

# The scale begins so high that the first steps overflow, and grows into an overflow again every few steps.
FORCED = LossScaleConfig(initial=2.0**34, growth_interval=2, growth_factor=2.0**14, backoff_factor=2.0**-8)
MODEL = {"num_layers": 2, "tie_embeddings": True}
SMALL = {"train_steps": 14, "decay_steps": 14, "sequence_length": 16, "global_batch_size": 4, "bucket_size_mb": 0.05}
RUN = {**SMALL, "precision": "fp16", "loss_scale": FORCED}


def _part(config, until):
    return config.model_copy(update={"train": config.train.model_copy(update={"train_steps": until})})


def _figures(lines):
    return [(line["step"], line["loss"], line["grad_norm"], line["loss_scale"], line["lr"]) for line in lines]


def _extra(point):
    return read_manifest(Path(point.directory)).extra


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_a_restart_in_the_middle_of_overflows_is_bit_equal(layout, corpus, tmp_path):
    twin = tiny_run(corpus, tmp_path / "twin", model=MODEL, **RUN)
    expected = train(twin, layout)
    skipped = [line["step"] for line in expected if line["grad_norm"] is None]
    assert len(skipped) >= 3
    assert skipped[0] == 1
    assert 14 - len(skipped) >= 4
    # Skipped steps consume their samples and move the schedule as any other.
    assert [line["consumed_samples"] for line in expected] == [4 * step for step in range(1, 15)]
    assert [line["lr"] for line in expected] == [learning_rate(step, twin.train) for step in range(14)]

    config = tiny_run(corpus, tmp_path / "run", model=MODEL, **RUN)
    until = skipped[1]
    lines = train(_part(config, until), layout)
    lines += train(config, layout, generation=2, restore=newest_checkpoint(config, until))
    assert _figures(lines) == _figures(expected)
    end = _extra(newest_checkpoint(config, 14, 2))
    assert end == _extra(newest_checkpoint(twin, 14))
    assert end["num_updates"] == 14 - len(skipped)


def test_scale_and_counters_move_to_another_layout(corpus, tmp_path):
    config = tiny_run(corpus, tmp_path, model=MODEL, **RUN)
    lines = train(_part(config, 5), Layout(dp=2))
    point = newest_checkpoint(config, 5)
    state = _extra(point)
    updates = sum(line["grad_norm"] is not None for line in lines)
    assert 0 < updates < 5
    assert state["num_updates"] == updates
    lines = train(_part(config, 6), Layout(tp=2), generation=2, restore=point)
    assert lines[0]["loss_scale"] == state["loss_scaler"]["scale"]
    expected = LossScaler.restored(FORCED, state["loss_scaler"]).after(overflow=lines[0]["grad_norm"] is None)
    after = _extra(newest_checkpoint(config, 6, 2))
    assert after["loss_scaler"] == expected.state()
    assert after["num_updates"] == updates + (lines[0]["grad_norm"] is not None)


def test_fp16_follows_fp32(corpus, tmp_path):
    """With a scale that fits, the curve is fp32's to fp16's rounding, and no step is skipped."""
    exact = train(tiny_run(corpus, tmp_path / "fp32", model=MODEL, **SMALL), Layout())
    scaling = LossScaleConfig(initial=2.0**12)
    config = tiny_run(corpus, tmp_path / "fp16", model=MODEL, **SMALL, precision="fp16", loss_scale=scaling)
    lines = train(config, Layout())
    assert all(line["grad_norm"] is not None for line in lines)
    assert max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(lines, exact, strict=True)) < 1e-3


def test_a_change_of_precision_keeps_the_count_of_updates(corpus, tmp_path):
    """fp16 to fp32 drops the scale; fp32 to fp16 begins with the initial one."""
    half = tiny_run(corpus, tmp_path, model=MODEL, **RUN)
    lines = train(_part(half, 4), Layout())
    updates = sum(line["grad_norm"] is not None for line in lines)
    full = half.model_copy(update={"train": half.train.model_copy(update={"precision": "fp32", "loss_scale": None})})
    lines = train(_part(full, 6), Layout(dp=2), generation=2, restore=newest_checkpoint(half, 4))
    assert "loss_scale" not in lines[0]
    assert _extra(newest_checkpoint(half, 6, 2)) == {"num_updates": updates + 2}
    lines = train(_part(half, 7), Layout(), generation=3, restore=newest_checkpoint(half, 6, 2))
    assert lines[0]["loss_scale"] == FORCED.initial
