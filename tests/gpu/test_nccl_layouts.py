"""What holds on gloo holds on NCCL: every layout of the GPUs there are follows one GPU, and state moves bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.planning.layout import Layout
from tests.engine.test_reshard import resave, whole_state
from tests.harness import run_ranks
from tests.training import newest_checkpoint, tiny_run, train

GPUS = torch.cuda.device_count()  # counts through the driver's management library: makes no context before the forks
LAYOUTS = [
    layout
    for layout in (
        Layout(tp=2),
        Layout(pp=2),
        Layout(dp=2),
        Layout(tp=2, pp=2),
        Layout(tp=2, dp=2),
        Layout(pp=2, dp=2),
        Layout(pp=3),
        Layout(dp=3),
    )
    if layout.world_size <= GPUS
]
MODEL = {"num_layers": 5, "hidden_size": 128, "ffn_hidden_size": 256}
SETTINGS = {"train_steps": 50, "lr": 5e-4, "warmup_steps": 10, "sequence_length": 64}


@pytest.fixture(scope="module")
def single(corpus, tmp_path_factory):
    """Losses of one GPU by precision and tied embeddings."""
    losses = {}
    for precision in ("fp32", "bf16"):
        for tied in (False, True):
            directory = tmp_path_factory.mktemp("single")
            config = tiny_run(
                corpus, directory, model={**MODEL, "tie_embeddings": tied}, precision=precision, **SETTINGS
            )
            losses[precision, tied] = [line["loss"] for line in train(config, Layout(), device="cuda")]
    return losses


def test_there_are_gpus():
    assert GPUS >= 2


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("bf16", 2e-2)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_follow_one_gpu(layout, precision, bound, tied, corpus, single, tmp_path):
    config = tiny_run(corpus, tmp_path, model={**MODEL, "tie_embeddings": tied}, precision=precision, **SETTINGS)
    losses = [line["loss"] for line in train(config, layout, device="cuda")]
    worst = max(abs(a - b) / b for a, b in zip(losses, single[precision, tied], strict=True))
    print(
        f"{layout} {precision} {'tied' if tied else 'untied'}: {losses[0]:.4f} -> {losses[-1]:.4f}, worst {worst:.2e}"
    )
    assert worst < bound


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_moves_between_layouts_bit_by_bit(precision, corpus, tmp_path):
    """Save in one layout, load and save at once in the next, round the circle and back to the first."""
    config = tiny_run(
        corpus, tmp_path, model=MODEL, precision=precision, **{**SETTINGS, "train_steps": 3, "warmup_steps": 1}
    )
    train(config, Layout(), device="cuda")
    point = newest_checkpoint(config, 3)
    original = whole_state(point.directory)
    for generation, layout in enumerate([*LAYOUTS, Layout()], start=2):
        run_ranks(layout.world_size, resave, config, layout, point, generation, "cuda")
        point = newest_checkpoint(config, 3, generation)
        moved = whole_state(point.directory)
        assert moved.keys() == original.keys()
        assert all(np.array_equal(original[name].view(np.int32), moved[name].view(np.int32)) for name in original)
