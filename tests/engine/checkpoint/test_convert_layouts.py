"""Whatever layout trained or saved the weights, an export has the same bytes; any layout starts from an import."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint.export_huggingface import export_huggingface
from engine.checkpoint.import_huggingface import import_huggingface
from engine.planning.layout import Layout
from engine.planning.messages import RestorePoint
from tests.engine.checkpoint.small_models import VOCAB, contents
from tests.engine.checkpoint.test_convert_huggingface import our_logits, their_logits
from tests.engine.test_reshard import resave
from tests.harness import groups_of, run_ranks
from tests.training import newest_checkpoint, tiny_run, train

LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2)]
MODELS = [
    {"num_layers": 2, "tie_embeddings": False, "rope_theta": 5000.0},
    {"num_layers": 2, "tie_embeddings": True},
    {
        "num_layers": 2,
        "num_key_value_heads": None,
        "position": "learned",
        "norm": "layernorm",
        "activation": "gelu",
        "bias": True,
        "tie_embeddings": True,
    },
]
MODEL_NAMES = ["llama-untied", "llama-tied", "gpt2-tied"]


def _difference(rank, store, checkpoint, directory):
    os.environ["HF_HUB_OFFLINE"] = "1"
    tokens = torch.randint(0, VOCAB, (2, 64), generator=torch.Generator().manual_seed(1))
    ours, _ = our_logits(checkpoint, groups_of(Layout(), rank, store), tokens)
    theirs, _ = their_logits(directory, tokens)
    return (ours - theirs).abs().max().item() / theirs.abs().max().item()


@pytest.mark.parametrize("model", MODELS, ids=MODEL_NAMES)
def test_exports_of_the_same_weights_are_byte_equal_whatever_the_layout(corpus, tmp_path, model):
    config = tiny_run(corpus, tmp_path / "run", model=model, train_steps=3)
    train(config, Layout(tp=2, pp=2))
    point = newest_checkpoint(config, 3)
    exports = {}
    for number, layout in enumerate(LAYOUTS):
        run_ranks(layout.world_size, resave, config, layout, point, 100 + number)
        moved = newest_checkpoint(config, 3, 100 + number)
        export_huggingface(Path(moved.directory), tmp_path / str(number), max_shard_bytes=150_000)
        exports[layout] = contents(tmp_path / str(number))
    export_huggingface(Path(point.directory), tmp_path / "trained", max_shard_bytes=150_000)
    expected = contents(tmp_path / "trained")
    assert len(expected) > 3
    assert all(export == expected for export in exports.values())

    written = json.loads(expected["config.json"])
    assert written["vocab_size"] == VOCAB and written["tie_word_embeddings"] == model["tie_embeddings"]
    if "rope_theta" in model:
        assert (written["num_key_value_heads"], written["rope_theta"]) == (2, 5000.0)
    state = {}
    for path in (tmp_path / "trained").glob("*.safetensors"):
        state.update(load_file(path))
    vocabulary = [name for name in state if "embed_tokens" in name or "wte" in name or "lm_head" in name]
    assert len(vocabulary) == 2 - model["tie_embeddings"]
    assert all(state[name].shape == (VOCAB, 64) for name in vocabulary)  # without the rows of padding
    [difference] = run_ranks(1, _difference, Path(point.directory), tmp_path / "trained", timeout_s=120)
    assert difference < 1e-5


def test_every_layout_trains_on_from_an_import(corpus, tmp_path):
    model = {"num_layers": 2, "tie_embeddings": True}
    config = tiny_run(corpus, tmp_path / "first", model=model, train_steps=2)
    train(config, Layout())
    trained = newest_checkpoint(config, 2)
    export_huggingface(Path(trained.directory), tmp_path / "hf")
    trails = []
    for number, layout in enumerate(LAYOUTS):
        config = tiny_run(corpus, tmp_path / f"next{number}", model=model, train_steps=3)
        directory = tmp_path / f"next{number}" / "checkpoints" / "step-000000000.g0"
        import_huggingface(tmp_path / "hf", directory)
        restore = RestorePoint(step=0, generation=0, directory=str(directory))
        trails.append([line["loss"] for line in train(config, layout, restore=restore)])
    scratch = [line["loss"] for line in train(tiny_run(corpus, tmp_path / "scratch", model=model), Layout())]
    assert all(len(trail) == 3 for trail in trails)
    for trail in trails[1:]:
        assert trail == pytest.approx(trails[0], rel=1e-5)
    assert trails[0][0] < scratch[0] - 0.01  # it did not start from the seed
