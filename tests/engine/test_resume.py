"""A run that is stopped, moved to another layout and resumed follows the run that was left alone, sample by sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.data.loader import CorpusSamples
from engine.data.order import samples_of_step
from engine.planning.layout import Layout
from engine.planning.messages import GenerationStart
from tests.training import newest_checkpoint, tiny_run, train


def _samples(config, generation):
    """step -> ids in the order of the global batch, as the ranks logged them when they consumed them."""
    found: dict[int, dict[int, list[int]]] = {}
    for path in sorted((Path(config.checkpoint.directory) / "samples").glob(f"g{generation:04d}-dp*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found.setdefault(record["step"], {})[record["dp"]] = record["samples"]
    return {step: [i for dp in sorted(parts) for i in parts[dp]] for step, parts in found.items()}


CHANGES = [
    (Layout(tp=2, dp=2), Layout(tp=2)),
    (Layout(dp=4), Layout(pp=4)),
    (Layout(pp=2, dp=2), Layout(pp=4)),
    (Layout(dp=2), Layout(dp=3)),
    (Layout(tp=2, pp=2), Layout()),
]


@pytest.mark.parametrize(
    ("before", "after", "batch"),
    # A replica needs a micro-batch, so the small batch only goes where DP is at most 2; legality says so at submit.
    [(a, b, batch) for a, b in CHANGES for batch in (8, 2) if batch >= max(a.dp, b.dp)],
    ids=str,
)
def test_changed_layouts_keep_the_batch_and_the_losses(before, after, batch, corpus, tmp_path):
    """Micro-batch arithmetic after a reshape, also with fewer micro-batches than stages."""
    settings = {"global_batch_size": batch, "train_steps": 12, "warmup_steps": 4}
    twin = tiny_run(corpus, tmp_path / "twin", **settings)
    expected = {line["step"]: line["loss"] for line in train(twin, Layout())}

    config = tiny_run(corpus, tmp_path / "run", **settings)
    first = config.model_copy(update={"train": config.train.model_copy(update={"train_steps": 5, "decay_steps": 12})})
    train(first, before)
    point = newest_checkpoint(config, 5)
    history = (GenerationStart(generation=1, start_step=0),)
    lines = train(config, after, generation=2, restore=point, history=history)
    assert [line["step"] for line in lines] == list(range(6, 13))
    assert max(abs(line["loss"] - expected[line["step"]]) / line["loss"] for line in lines) < 1e-5

    samples = CorpusSamples(corpus, config.train.sequence_length, vocab_size=config.model.vocab_size)
    consumed = {**_samples(config, 1), **_samples(config, 2)}
    assert sorted(consumed) == list(range(1, 13))
    for step, ids in consumed.items():
        assert ids == samples_of_step(step - 1, batch, samples.num_samples, config.train.seed).tolist()


@pytest.mark.parametrize("multiple", [1, 128])
def test_vocabulary_padding_does_not_depend_on_the_layout_and_never_shows(multiple, corpus, tmp_path):
    """1003 entries under 1, 2 and 4 tensor ranks in turn: the losses are those of one rank throughout."""
    model = {"vocab_padding_multiple": multiple, "num_key_value_heads": 4}
    settings = {"train_steps": 12, "decay_steps": 12, "warmup_steps": 2}
    twin = tiny_run(corpus, tmp_path / "twin", model=model, **settings)
    expected = {line["step"]: line["loss"] for line in train(twin, Layout())}
    config = tiny_run(corpus, tmp_path / "run", model=model, **settings)
    point, history = None, ()
    for generation, (tp, until) in enumerate([(1, 3), (2, 6), (4, 9), (1, 12)], start=1):
        part = config.model_copy(update={"train": config.train.model_copy(update={"train_steps": until})})
        lines = train(part, Layout(tp=tp), generation=generation, restore=point, history=history)
        assert max(abs(line["loss"] - expected[line["step"]]) / line["loss"] for line in lines) < 1e-5
        history = (*history, GenerationStart(generation=generation, start_step=point.step if point else 0))
        point = newest_checkpoint(config, until, generation)
    manifest = json.loads((Path(point.directory) / "manifest.json").read_text())
    assert manifest["tensors"]["weight/embedding.tokens.weight"]["shape"][0] == 1003


def test_another_global_batch_is_refused(corpus, tmp_path):
    """The position in the data counts global batches: with another batch samples would be skipped or repeated."""
    train(tiny_run(corpus, tmp_path, train_steps=2), Layout())
    config = tiny_run(corpus, tmp_path, global_batch_size=4)
    with pytest.raises(AssertionError, match=r"train\.global_batch_size 4: .* has consumed 16 samples in 2 steps"):
        train(config, Layout(), generation=2, restore=newest_checkpoint(config, 2))
