"""Replicas hold the same bits: after a kill and a restore, and for as long as they train on; so do tensor ranks' norms.

The case behind it: after a restore the gather of the updated shards is left out, and every replica trains a model of
its own, with losses that look right.
"""

from __future__ import annotations

import hashlib
import os
import signal

import pytest
import torch

from engine.agent_link import AgentLink
from engine.parameters import spec_of
from engine.planning.layout import Layout
from engine.planning.messages import GenerationStart
from engine.telemetry import Telemetry
from engine.train import Trainer
from tests.harness import groups_of, run_ranks
from tests.reference import initial_weights
from tests.training import launch_of, metrics, newest_checkpoint, tiny_run

SAVED, KILLED_AT, END = 10, 12, 31
LOOKED_AT = (SAVED + 1, SAVED + 6, SAVED + 21)
CPU = torch.device("cpu")


class _Watch(Telemetry):
    """Looks at the parameters when a step is complete; may kill its process then."""

    def __init__(self, launch, link, kill_at):
        super().__init__(launch, link, CPU)
        self.kill_at = kill_at
        self.trainer = None
        self.seen = {}

    def completed(self, step, **figures):
        super().completed(step, **figures)
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step in LOOKED_AT:
            self.seen[step] = hashes(self.trainer.stage)


def hashes(stage):
    """(same on all tensor ranks, hash of the bits) of each parameter."""
    return {
        name: (
            spec_of(p).tp_replicated,
            hashlib.sha256(p.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
        )
        for name, p in stage.named_parameters()
    }


def trainer_of(rank, store, config, layout, kill_at=None, **kwargs):
    launch = launch_of(config, layout, rank, **kwargs)
    link = AgentLink.connect(launch)
    watch = _Watch(launch, link, kill_at)
    watch.trainer = Trainer(launch, groups_of(layout, rank, store), link, watch, CPU)
    return watch


def _train(rank, store, config, layout, kill_at, kwargs):
    watch = trainer_of(rank, store, config, layout, kill_at, **kwargs)
    restored = hashes(watch.trainer.stage)
    watch.trainer.run()
    return {watch.trainer.launch.start_step: restored, **watch.seen}


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(Layout(dp=2), "fp32"), (Layout(dp=4), "fp32"), (Layout(tp=2, dp=2), "fp32"), (Layout(dp=2), "bf16")],
    ids=str,
)
def test_after_a_kill_and_a_restore_replicas_hold_the_same_bits(layout, precision, corpus, tmp_path):
    def run(directory):
        config = tiny_run(corpus, directory, train_steps=END, warmup_steps=4, bucket_size_mb=0.1, precision=precision)
        saving = config.checkpoint.model_copy(update={"save_interval": SAVED})
        return config.model_copy(update={"checkpoint": saving})

    control, config = run(tmp_path / "control"), run(tmp_path / "run")
    undisturbed = run_ranks(layout.world_size, _train, control, layout, None, {})
    with pytest.raises(AssertionError, match="ended without a result"):
        run_ranks(layout.world_size, _train, config, layout, KILLED_AT, {})
    again = {
        "generation": 2,
        "restore": newest_checkpoint(config, SAVED),
        "history": (GenerationStart(generation=1, start_step=0),),
    }
    ranks = run_ranks(layout.world_size, _train, config, layout, None, again)

    previous = None
    for step in (SAVED, *LOOKED_AT):
        for rank, seen in enumerate(ranks):
            at = layout.coordinates(rank)
            first = ranks[at.tp][step]  # replica 0
            assert seen[step] == first, f"step {step}: rank {rank} and rank {at.tp} are replicas and differ"
            for name, (replicated, bits) in first.items():
                assert not replicated or bits == ranks[0][step][name][1], f"step {step}: {name} of tensor rank {at.tp}"
        assert any(replicated for replicated, _ in ranks[0][step].values())
        if layout.tp > 1:
            assert ranks[0][step] != ranks[1][step], "tensor ranks hold parts of their own"
        assert ranks[0][step] != previous, "nothing was trained"
        previous = ranks[0][step]
    for step in LOOKED_AT:
        assert [seen[step] for seen in ranks] == [seen[step] for seen in undisturbed], f"step {step}: not the control"
    losses = [line["loss"] for line in metrics(config, 2)]
    assert losses == [line["loss"] for line in metrics(control, 1)][SAVED:]


def _begin(rank, store, config, layout):
    trainer = trainer_of(rank, store, config, layout).trainer
    weights = initial_weights(config.model, config.train.seed)
    for piece in trainer.optimizer.pieces():
        kind, name = piece.name.split("/")
        assert piece.dtype == torch.float32
        if kind == "weight":
            assert torch.equal(piece.data, weights[name][piece.box.slices]), piece.name
        else:
            assert not piece.data.any()
    for parameter in trainer.stage.parameters():
        covered = 0
        for segment in spec_of(parameter).segments:
            box = tuple(slice(o, o + s) for o, s in zip(segment.offset, segment.size, strict=True))
            rows = parameter[segment.row : segment.row + segment.size[0]]
            assert torch.equal(rows, weights[segment.name][box].to(parameter.dtype)), segment.name
            covered += segment.size[0]
        assert not parameter[covered:].any()
    return len(weights)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [Layout(), Layout(dp=3), Layout(tp=2, pp=2, dp=2)], ids=str)
def test_every_layout_and_precision_begins_with_the_same_fp32_state(layout, precision, corpus, tmp_path):
    """The masters of a bf16 run are not rounded; its parameters are, to the nearest."""
    config = tiny_run(corpus, tmp_path, precision=precision, bucket_size_mb=0.1, model={"tie_embeddings": True})
    assert min(run_ranks(layout.world_size, _begin, config, layout)) > 20
