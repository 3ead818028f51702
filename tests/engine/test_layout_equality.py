"""The loss does not depend on the layout: every layout follows a plain one-process model and torch's own AdamW.

Real text, fp32. The peak learning rate is 5e-4, at which the loss falls by more than 1 in 100 steps while the
reference's own fp32 run stays within 1e-6 of its float64 run: so 1e-5 leaves room for rounding and for nothing else.
(At 1e-3 this model, with 512 tokens a step, amplifies rounding: fp32 and float64 are 8e-5 apart after 100 steps.)
"""

from pathlib import Path

import pytest
import torch

from engine.data.loader import BatchLoader, CorpusSamples
from engine.planning.layout import Layout, illegal_reasons
from tests.harness import run_ranks
from tests.reference import train_reference
from tests.training import tiny_run, train

STEPS = 100
MODEL = {"hidden_size": 128, "ffn_hidden_size": 256, "max_sequence_length": 64}


def _config(corpus, directory, num_layers):
    return tiny_run(
        corpus,
        directory,
        model={**MODEL, "num_layers": num_layers},
        sequence_length=64,
        train_steps=STEPS,
        lr=5e-4,
        warmup_steps=10,
    )


def _reference(rank, store, cases):
    """Each rank trains one case on its own."""
    config, dtype = cases[rank]
    samples = CorpusSamples(config.data.path, config.train.sequence_length, vocab_size=config.model.vocab_size)
    loader = BatchLoader(samples, config.train, Layout(), 0)

    def batches():
        for step in range(config.train.train_steps):
            yield [torch.cat([tokens, targets[:, -1:]], dim=1) for tokens, targets in loader.step(step)]

    losses = train_reference(config, batches(), dtype)
    loader.close()
    return losses


@pytest.fixture(scope="module")
def references(corpus, tmp_path_factory):
    """Losses of the plain model by number of layers: fp32 and float64."""
    configs = {layers: _config(corpus, tmp_path_factory.mktemp("reference"), layers) for layers in (4, 5)}
    cases = [(config, dtype) for config in configs.values() for dtype in (torch.float32, torch.float64)]
    losses = run_ranks(len(cases), _reference, cases, timeout_s=300)
    return {4: losses[:2], 5: losses[2:]}


@pytest.mark.timeout(400)
def test_the_reference_itself_is_exact_enough_and_learns(references):
    for single, double in references.values():
        assert len(single) == len(double) == STEPS
        assert double[0] - double[-1] >= 1.0
        assert max(abs(a - b) / b for a, b in zip(single, double, strict=True)) < 1e-6


@pytest.mark.parametrize(
    ("layout", "num_layers"),
    [
        (Layout(tp=2), 4),
        (Layout(pp=2), 4),
        (Layout(dp=2), 4),
        (Layout(tp=2, pp=2), 4),
        (Layout(tp=2, pp=2, dp=2), 4),
        (Layout(pp=3), 5),  # uneven stages: 2, 2, 1
        (Layout(dp=3), 4),  # 8 micro-batches over 3 replicas: 3, 3, 2
    ],
    ids=str,
)
def test_losses_follow_the_one_process_reference(layout, num_layers, corpus, references, tmp_path: Path):
    lines = train(_config(corpus, tmp_path, num_layers), layout)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for expected in references[num_layers]:
        worst = max(abs(line["loss"] - loss) / loss for line, loss in zip(lines, expected, strict=True))
        assert worst < 1e-5


def test_more_tensor_ranks_than_key_value_heads_is_refused_with_the_reason(corpus, tmp_path: Path):
    config = _config(corpus, tmp_path, 4)
    assert illegal_reasons(Layout(tp=4), config.model, config.train) == [
        "model.num_key_value_heads 2 is not divisible by layout.tp 4"
    ]
