"""Dropout masks belong to a micro-batch of the run: no layout, order of execution or restart changes them."""

from __future__ import annotations

import pytest
import torch

from engine.models.dropout import HiddenDropout, MaskKey
from engine.models.transformer import Stage
from engine.planning.config import ModelConfig
from engine.planning.layout import Layout
from engine.planning.messages import GenerationStart
from tests.harness import groups_of, run_ranks
from tests.training import newest_checkpoint, tiny_run, train
from tests.weights import initialise

KEY = MaskKey(seed=1, step=2, microbatch=3)
MODEL = {"hidden_dropout": 0.2, "num_layers": 3, "tie_embeddings": True, "position": "learned"}
SETTINGS = {"train_steps": 10, "decay_steps": 10, "warmup_steps": 2}


def test_a_mask_is_a_function_of_its_key_and_site_alone():
    x = torch.ones(7, 2, 16)
    first = HiddenDropout("layers.0.mlp", 0.5)(x, KEY)
    torch.rand(5)  # the global generator has no part in it
    assert torch.equal(first, HiddenDropout("layers.0.mlp", 0.5)(x, KEY))
    others = [
        HiddenDropout("layers.0.mlp", 0.5)(x, MaskKey(2, 2, 3)),
        HiddenDropout("layers.0.mlp", 0.5)(x, MaskKey(1, 3, 3)),
        HiddenDropout("layers.0.mlp", 0.5)(x, MaskKey(1, 2, 4)),
        HiddenDropout("layers.0.attention", 0.5)(x, KEY),
    ]
    assert not any(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_it_drops_its_share_and_keeps_the_mean(rate):
    y = HiddenDropout("embedding", rate)(torch.ones(64, 8, 512), KEY)
    share = (y == 0).double().mean().item()
    assert abs(share - rate) < 5 * (rate * (1 - rate) / y.numel()) ** 0.5
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1.0 / (1.0 - rate)).item()}


def test_bf16_and_fp32_runs_drop_the_same_places():
    x = torch.ones(7, 2, 16)
    dropout = HiddenDropout("embedding", 0.5)
    low = dropout(x.bfloat16(), KEY)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low.float(), dropout(x, KEY))


def test_without_a_key_or_a_rate_nothing_is_done():
    x = torch.ones(3, 1, 4)
    assert HiddenDropout("embedding", 0.5)(x, None) is x
    assert HiddenDropout("embedding", 0.0)(x, KEY) is x


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_that_is_no_share_is_refused(rate, corpus, tmp_path):
    with pytest.raises(ValueError, match="hidden_dropout"):
        tiny_run(corpus, tmp_path, model={"hidden_dropout": rate})


def test_dropout_of_attention_probabilities_is_refused_by_name(corpus, tmp_path):
    with pytest.raises(ValueError, match="attention_dropout"):
        tiny_run(corpus, tmp_path, model={"attention_dropout": 0.1})


def _evaluated(rank, store, model):
    stages = []
    for rate in (0.0, 0.5):
        config = model.model_copy(update={"hidden_dropout": rate})
        stages.append(Stage(config, groups_of(Layout(), rank, store), dtype=torch.float32, device=torch.device("cpu")))
        initialise(stages[-1], config, seed=1)
    tokens = torch.arange(2 * 33).view(2, 33) * 7 % model.vocab_size
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    plain, dropping = stages
    assert torch.equal(plain(inputs, targets, KEY), plain(inputs, targets))
    assert torch.equal(dropping(inputs, targets), plain(inputs, targets))
    assert torch.equal(dropping.logits(inputs), plain.logits(inputs))
    assert not torch.equal(dropping(inputs, targets, KEY), plain(inputs, targets))


def test_evaluation_has_no_dropout(corpus, tmp_path):
    model: ModelConfig = tiny_run(corpus, tmp_path, model=MODEL).model
    run_ranks(1, _evaluated, model)


def _worst(lines, expected):
    return max(abs(line["loss"] - expected[line["step"]]) / expected[line["step"]] for line in lines)


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    """Loss by step of one rank that runs through."""
    config = tiny_run(corpus, tmp_path_factory.mktemp("undisturbed"), model=MODEL, **SETTINGS)
    return {line["step"]: line["loss"] for line in train(config, Layout())}


def test_dropout_changes_the_losses(corpus, tmp_path, undisturbed):
    config = tiny_run(corpus, tmp_path, model={**MODEL, "hidden_dropout": 0.0}, **SETTINGS)
    assert _worst(train(config, Layout()), undisturbed) > 1e-3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Layout(tp=2, dp=2), Layout(pp=3)),
        (Layout(pp=2), Layout(dp=3)),  # 1F1B: other orders of micro-batches, then uneven replicas
        (Layout(dp=3), Layout(tp=2, pp=2)),
    ],
    ids=str,
)
def test_a_run_resumed_in_another_layout_has_the_undisturbed_losses(before, after, corpus, tmp_path, undisturbed):
    config = tiny_run(corpus, tmp_path, model=MODEL, **SETTINGS)
    first = config.model_copy(update={"train": config.train.model_copy(update={"train_steps": 4})})
    start = train(first, before)
    history = (GenerationStart(generation=1, start_step=0),)
    end = train(config, after, generation=2, restore=newest_checkpoint(config, 4), history=history)
    assert [line["step"] for line in start + end] == list(range(1, 11))
    assert _worst(start + end, undisturbed) < 1e-5
