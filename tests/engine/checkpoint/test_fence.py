"""A ghost neither publishes nor deletes once a newer generation has claimed the checkpoints."""

from __future__ import annotations

import pytest
import torch

from engine.agent_link import AgentLink
from engine.checkpoint.catalog import directory_name
from engine.checkpoint.errors import CheckpointSuperseded
from engine.checkpoint.fence import claim, newest_claim
from engine.planning.layout import Layout
from engine.telemetry import Telemetry
from engine.train import Trainer
from tests.harness import groups_of, run_ranks
from tests.training import launch_of, tiny_run


def test_the_newest_claim_wins_and_older_generations_are_refused(tmp_path):
    directory = tmp_path / "job" / "checkpoints"
    assert newest_claim(directory) == 0
    for generation in (1, 1, 9, 10):
        claim(directory, generation)
        assert newest_claim(directory) == generation
    with pytest.raises(CheckpointSuperseded, match="generation 10 was here before generation 9"):
        claim(directory, 9)
    assert [path.name for path in directory.iterdir()] == ["generation-10"]


def _ghost(rank, store, config, layout, directory):
    """Generation 1 saves at step 2; during its step 3, generation 2 begins and saves; step 4 is a ghost's."""

    class _Other(Telemetry):
        def completed(self, step, **figures):
            super().completed(step, **figures)
            if step == 3 and rank == 0:
                claim(directory, 2)
                (directory / directory_name(3, 2)).mkdir()
                (directory / directory_name(3, 2) / "manifest.json").write_text("{}")

    cpu = torch.device("cpu")
    launch = launch_of(config, layout, rank)
    link = AgentLink.connect(launch)
    trainer = Trainer(launch, groups_of(layout, rank, store), link, _Other(launch, link, cpu), cpu)
    try:
        trainer.run()
    except CheckpointSuperseded as error:
        return str(error)
    return "went on"


def test_a_ghost_is_stopped_on_all_ranks_and_deletes_nothing(corpus, tmp_path):
    config = tiny_run(corpus, tmp_path, train_steps=6)
    checkpoint = config.checkpoint.model_copy(update={"save_interval": 2, "keep": 1, "asynchronous": False})
    config = config.model_copy(update={"checkpoint": checkpoint})
    directory = tmp_path / "checkpoints"
    for told in run_ranks(2, _ghost, config, Layout(dp=2), directory):
        assert "generation 1 is no longer the current one" in told
    left = sorted(path.name for path in directory.iterdir())
    assert left == ["generation-2", directory_name(2, 1), directory_name(3, 2)]
