"""Frozen and never-used parameters: what torch's AdamW makes of them, in any layout and through changes of layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.checkpoint.boxes import Box
from engine.checkpoint.errors import CheckpointMismatch
from engine.checkpoint.load import check_model, load_checkpoint
from engine.checkpoint.manifest import TensorEntry, read_manifest
from engine.checkpoint.pieces import Piece
from engine.models.frozen import frozen_names
from engine.models.transformer import initial_values
from engine.parameters import Segment
from engine.planning.layout import Layout
from engine.planning.presets import preset
from tests.harness import run_ranks
from tests.toy_stages import BATCH, SEQ, ToyStage, micro_batch, name_of, settings
from tests.toy_training import MICRO_BATCHES, Replica, whole_state
from tests.training import newest_checkpoint, tiny_run, train

LLAMA = preset("llama-tiny")


# Which parameters a pattern means.


def test_patterns_name_global_parameters():
    assert frozen_names(LLAMA, ()) == frozenset()
    assert frozen_names(LLAMA, ("embedding.*", "final_norm.weight")) == {
        "embedding.tokens.weight",
        "final_norm.weight",
    }
    attention = frozen_names(LLAMA, ("layers.0.attention.*",))
    assert {name.split(".")[3] for name in attention} == {"query", "key", "value", "output"}


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (("layer.0.*",), r"'layer\.0\.\*' matches no parameter"),
        (("*",), "leave no parameter to train"),
        (("layers.0.attention.query.weight",), "freeze all of them or none"),
        (("layers.*.mlp.up.weight",), "freeze all of them or none"),
    ],
)
def test_what_cannot_be_frozen_is_refused_by_its_pattern(patterns, words):
    with pytest.raises(ValueError, match=f"train.frozen: .*{words}"):
        frozen_names(LLAMA, patterns)


# The toy against torch's AdamW.

STEPS = 12


def _torch_adamw(rank, store, frozen):
    """Frozen: no gradient, left out. Never used: its gradient is zero, as ``zero_grad(set_to_none=False)`` makes it."""
    train = settings(clip_grad=0.9)
    model = ToyStage(0, Layout(), unused=True)
    for p in model.parameters():
        p.requires_grad_(name_of(p) not in frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    decays = ([p for p in trained if (p.dim() > 1) is decayed] for decayed in (True, False))
    adamw = torch.optim.AdamW(
        [{"params": p, "weight_decay": d} for p, d in zip(decays, (train.weight_decay, 0.0), strict=True)],
        lr=train.lr,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        foreach=False,
    )
    for step in range(STEPS):
        for p in trained:
            p.grad = torch.zeros_like(p)
        for number in range(MICRO_BATCHES):
            (model(*micro_batch(step, number)) * (1.0 / (MICRO_BATCHES * BATCH * SEQ))).backward()
        norm = sum(p.grad.double().square().sum() for p in trained).sqrt().item()
        if norm > train.clip_grad:
            for p in trained:
                p.grad.mul_(train.clip_grad / (norm + 1e-6))
        adamw.step()
    state = {f"weight/{name_of(p)}": p.detach().numpy() for p in model.parameters()}
    for kind in ("exp_avg", "exp_avg_sq"):
        state.update({f"{kind}/{name_of(p)}": adamw.state[p][kind].numpy() for p in trained})
    return state


def _toy(rank, store, layout, frozen, state, start, steps):
    replica = Replica(rank, store, layout, settings(clip_grad=0.9), frozen=frozen, unused=True)
    if state is not None:
        for piece in replica.optimizer.pieces():
            # The never-used parameter is one for each stage: only the first stage's is in every layout.
            if piece.name in state:
                piece.data.copy_(state[piece.name][piece.box.slices])
        replica.optimizer.after_load(start)
    replica.run(steps, start=start)
    for parameter in replica.stage.parameters():
        assert (parameter.grad is None) is (name_of(parameter) in frozen)
    return replica.state()


def _trained(layout, frozen, state=None, start=0, steps=STEPS):
    found = whole_state(run_ranks(layout.world_size, _toy, layout, frozen, state, start, steps))
    return {name: values for name, values in found.items() if "unused" not in name or name.endswith(".0")}


FROZEN = [
    ("layers.1.weight",),
    ("embedding", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"),  # the first of two stages
    ("head", "layers.2.weight", "layers.2.bias"),  # the last one
]


@pytest.mark.parametrize("frozen", FROZEN, ids=["one", "first-stage", "last-stage"])
def test_it_is_torch_adamw_in_every_layout_and_across_changes(frozen):
    [expected] = run_ranks(1, _torch_adamw, frozen)
    assert not expected["exp_avg/unused.0"].any()
    assert not expected["exp_avg_sq/unused.0"].any()

    def check(state, *, exact):
        assert state.keys() == expected.keys()
        for name, values in state.items():
            if exact or name.removeprefix("weight/") in frozen or "unused" in name:
                assert torch.equal(values, torch.from_numpy(expected[name])), name
            torch.testing.assert_close(values, torch.from_numpy(expected[name]), rtol=1e-6, atol=1e-7)

    check(_trained(Layout(), frozen), exact=True)
    for before, after in [(Layout(dp=2), Layout(pp=2)), (Layout(pp=2, dp=2), Layout(dp=3))]:
        half = _trained(before, frozen, steps=5)
        check(_trained(after, frozen, half, start=5, steps=STEPS - 5), exact=False)


# The model, through checkpoints.

PATTERNS = ("embedding.*", "layers.0.attention.*", "layers.0.attention_norm.*", "layers.2.mlp.*")
MODEL = {"num_layers": 3, "vocab_padding_multiple": 1024}  # under TP the last rank's vocabulary is padding alone
SETTINGS = {"train_steps": 8, "decay_steps": 8, "bucket_size_mb": 0.05}


def _state(point) -> dict[str, np.ndarray]:
    pieces = []
    for name, tensor in read_manifest(Path(point.directory)).tensors.items():
        pieces.append(
            Piece(name, tensor.shape, torch.float32, Box.whole(tensor.shape), torch.full(tensor.shape, torch.nan))
        )
    load_checkpoint(pieces, Path(point.directory))
    return {piece.name: piece.data.numpy() for piece in pieces}


def _part(config, until, **changes):
    return config.model_copy(update={"train": config.train.model_copy(update={"train_steps": until, **changes})})


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    config = tiny_run(corpus, directory, model=MODEL, frozen=PATTERNS, **SETTINGS)
    lines = train(config, Layout())
    return {line["step"]: line["loss"] for line in lines}, _state(newest_checkpoint(config, 8))


@pytest.mark.parametrize(
    ("before", "after"),
    [(Layout(tp=2, dp=2), Layout(pp=3)), (Layout(pp=2), Layout(dp=3)), (Layout(dp=3), Layout(tp=2))],
    ids=str,
)
def test_a_frozen_run_moves_between_layouts(before, after, corpus, tmp_path, undisturbed):
    losses, end = undisturbed
    config = tiny_run(corpus, tmp_path, model=MODEL, frozen=PATTERNS, **SETTINGS)
    frozen = frozen_names(config.model, PATTERNS)
    lines = train(_part(config, 4), before)
    lines += train(config, after, generation=2, restore=newest_checkpoint(config, 4))
    assert max(abs(line["loss"] - losses[line["step"]]) / line["loss"] for line in lines) < 1e-5
    state = _state(newest_checkpoint(config, 8, 2))
    assert state.keys() == end.keys()
    initial = initial_values(config.model, config.train.seed)
    for name, values in state.items():
        kind, parameter = name.split("/")
        if parameter in frozen:
            assert kind == "weight"
            scaled = parameter.endswith(("output.weight", "down.weight"))
            init = "ones" if "norm" in parameter else "normal_scaled" if scaled else "normal"
            whole = initial(Segment(parameter, values.shape, (0, 0), values.shape, 0, init))
            assert torch.equal(torch.from_numpy(values), whole), name
        else:
            np.testing.assert_allclose(values, end[name], rtol=1e-5, atol=1e-5)  # atol: a hundredth of an update
    assert {f"exp_avg/{name}" for name in frozen}.isdisjoint(state)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_thawing_begins_with_zero_moments_and_freezing_drops_them(precision, corpus, tmp_path):
    """Thaw the MLP of layer 2, freeze the norm at the end; the rest goes on with the moments that it had."""
    config = tiny_run(corpus, tmp_path, model=MODEL, frozen=PATTERNS, precision=precision, **SETTINGS)
    train(_part(config, 4), Layout(tp=2))
    point = newest_checkpoint(config, 4)
    start = _state(point)
    changed = _part(config, 5, frozen=("embedding.*", "final_norm.*"), weight_decay=0.0)
    train(changed, Layout(dp=2), generation=2, restore=point)
    end = _state(newest_checkpoint(config, 5, 2))
    thawed = {name.removeprefix("exp_avg/") for name in end.keys() - start.keys() if name.startswith("exp_avg/")}
    assert thawed == frozen_names(config.model, PATTERNS) - {"embedding.tokens.weight"}
    assert start.keys() - end.keys() == {"exp_avg/final_norm.weight", "exp_avg_sq/final_norm.weight"}
    train_settings = config.train
    for name in thawed:
        # One update from zero moments: both are a function of the one gradient.
        gradient = torch.from_numpy(end[f"exp_avg/{name}"]).double() / (1 - train_settings.adam_beta1)
        squared = torch.from_numpy(end[f"exp_avg_sq/{name}"]).double() / (1 - train_settings.adam_beta2)
        assert gradient.any()
        torch.testing.assert_close(gradient.square(), squared, rtol=1e-5, atol=1e-15)
    for name in ("weight/embedding.tokens.weight", "weight/final_norm.weight"):
        assert np.array_equal(start[name], end[name]), name


def test_a_moment_that_is_missing_for_no_such_reason_is_refused_by_name(corpus, tmp_path):
    config = tiny_run(corpus, tmp_path, model=MODEL, frozen=PATTERNS, **SETTINGS)
    train(_part(config, 1), Layout())
    manifest = read_manifest(Path(newest_checkpoint(config, 1).directory))
    assert "exp_avg/layers.2.mlp.up.weight" not in manifest.tensors
    model = dict(manifest.tensors)
    check_model(manifest, model)
    without = manifest.model_copy(
        update={"tensors": {n: t for n, t in manifest.tensors.items() if n != "exp_avg/final_norm.weight"}}
    )
    with pytest.raises(CheckpointMismatch, match=r"exp_avg/final_norm\.weight: not in the checkpoint"):
        check_model(without, model)
    with pytest.raises(CheckpointMismatch, match=r"exp_avg/final_norm\.weight: in the checkpoint, not in the model"):
        check_model(manifest, dict(without.tensors))
    other = TensorEntry(shape=(3,), dtype="float32")
    with pytest.raises(CheckpointMismatch, match=r"exp_avg/other: not in the checkpoint"):
        check_model(manifest, {**model, "exp_avg/other": other})
