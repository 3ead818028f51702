"""State moves between layouts bit by bit: whatever layout saved it, whatever layout loads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.agent_link import AgentLink
from engine.checkpoint.boxes import Box
from engine.checkpoint.load import load_checkpoint
from engine.checkpoint.manifest import read_manifest
from engine.checkpoint.pieces import Piece
from engine.checkpoint.save import save_checkpoint
from engine.planning.layout import Layout
from engine.precision import configure_device
from engine.telemetry import Telemetry
from engine.train import Trainer
from tests.harness import groups_of, run_ranks
from tests.training import launch_of, newest_checkpoint, tiny_run, train

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(tp=2, pp=2),
    Layout(tp=2, pp=2, dp=2),
    Layout(pp=3),  # uneven stages
    Layout(dp=3),  # uneven micro-batches and uneven optimizer shards
]
MODEL = {"num_layers": 5}  # uneven in two and in three stages


def whole_state(directory: str) -> dict[str, np.ndarray]:
    """Every global tensor of a checkpoint, gathered from its boxes."""
    manifest = read_manifest(Path(directory))
    pieces = []
    for name, tensor in manifest.tensors.items():
        shape = tuple(tensor.shape)
        box = Box(offset=(0,) * len(shape), size=shape)
        pieces.append(Piece(name, shape, torch.float32, box, torch.full(shape, float("nan")), owned=True))
    load_checkpoint(pieces, Path(directory))
    return {piece.name: piece.data.numpy() for piece in pieces}


def resave(rank, store, config, layout, restore, generation, device="cpu"):
    """Load ``restore`` in ``layout`` and save it again as ``generation``."""
    launch = launch_of(config, layout, rank, generation=generation, restore=restore, device=device)
    where = torch.device(launch.device)
    configure_device(where, 1)
    groups = groups_of(layout, rank, store, device=where)
    link = AgentLink.connect(launch)
    trainer = Trainer(launch, groups, link, Telemetry(launch, link, where), where)
    save_checkpoint(
        trainer.optimizer.pieces(),
        Path(launch.run_directory) / "checkpoints",
        groups.world,
        job=launch.job,
        generation=generation,
        step=restore.step,
        run=config,
        layout=layout,
        device=where,
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.timeout(400)
def test_every_pair_of_layouts_is_bit_equal_and_there_and_back_gives_the_same(corpus, tmp_path, tied):
    saved = {}
    for number, layout in enumerate(LAYOUTS):
        config = tiny_run(corpus, tmp_path / f"from{number}", model={**MODEL, "tie_embeddings": tied}, train_steps=3)
        train(config, layout)
        saved[layout] = (config, newest_checkpoint(config, 3))
    for source, (config, point) in saved.items():
        original = whole_state(point.directory)
        kinds = {name.split("/")[0] for name in original}
        assert kinds == {"weight", "exp_avg", "exp_avg_sq"}
        assert all(np.isfinite(values).all() for values in original.values())
        assert all(np.any(values) for name, values in original.items() if name.startswith("exp_avg/"))
        for number, target in enumerate(LAYOUTS):
            run_ranks(target.world_size, resave, config, target, point, 100 + number)
            moved = newest_checkpoint(config, 3, 100 + number)
            there = whole_state(moved.directory)
            assert there.keys() == original.keys()
            for name, values in original.items():
                assert np.array_equal(values.view(np.int32), there[name].view(np.int32)), (source, target, name)
        # A -> B -> A: the last target goes back to the source.
        run_ranks(source.world_size, resave, config, source, moved, 200)
        back = whole_state(newest_checkpoint(config, 3, 200).directory)
        assert all(
            np.array_equal(values.view(np.int32), back[name].view(np.int32)) for name, values in original.items()
        )
