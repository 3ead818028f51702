"""Make a golden checkpoint of the current format version: ``python -m tests.golden.make``.

It goes to ``tests/golden/format-<version>``, which must not be there yet: a golden checkpoint is made once, when its
format version is new, and then stays as it is. ``expected.json`` beside it has a digest of each global tensor, taken
from the ranks' memory and not read back from the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.agent_link import AgentLink
from engine.checkpoint.manifest import FORMAT_VERSION, read_manifest
from engine.data.indexed import CorpusWriter
from engine.planning.config import CheckpointConfig, CorpusConfig, ModelConfig, RunConfig, TrainConfig
from engine.planning.layout import Layout
from engine.telemetry import Telemetry
from engine.train import Trainer
from tests.harness import groups_of, run_ranks
from tests.training import launch_of

GOLDEN = Path(__file__).parent
LAYOUT = Layout(tp=2, dp=2)
STEP = 3
RUN = RunConfig(
    model=ModelConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        ffn_hidden_size=12,
        vocab_size=17,
        max_sequence_length=8,
        vocab_padding_multiple=4,
    ),
    data=CorpusConfig(path="corpus"),
    train=TrainConfig(sequence_length=8, global_batch_size=4, train_steps=STEP, lr=1e-2),
    checkpoint=CheckpointConfig(directory=".", save_interval=STEP),
)


def digest(values: np.ndarray) -> str:
    """SHA-256 of an array's bytes in row-major order, little-endian."""
    return hashlib.sha256(np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes()).hexdigest()


def gathered(ranks: list[list[tuple[Any, ...]]]) -> dict[str, np.ndarray]:
    """The global tensors, put together from what ``held`` returned on all ranks."""
    tensors: dict[str, np.ndarray] = {}
    for name, shape, offset, values in (piece for pieces in ranks for piece in pieces):
        whole = tensors.setdefault(name, np.full(shape, np.nan, values.dtype))
        whole[tuple(slice(o, o + s) for o, s in zip(offset, values.shape, strict=True))] = values
    return tensors


def held(pieces) -> list[tuple[Any, ...]]:
    """A rank's pieces: (name, global shape, offset, values)."""
    return [(p.name, p.global_shape, p.box.offset, p.data.numpy().copy()) for p in pieces]


def _train(rank, store):
    launch = launch_of(RUN, LAYOUT, rank)
    cpu = torch.device("cpu")
    link = AgentLink.connect(launch)
    trainer = Trainer(launch, groups_of(LAYOUT, rank, store), link, Telemetry(launch, link, cpu), cpu)
    trainer.run()
    return held(trainer.optimizer.pieces())


def main() -> int:
    """Train, save, keep."""
    target = GOLDEN / f"format-{FORMAT_VERSION}"
    if target.exists():
        print(f"{target} is there already and stays as it is", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)  # so that no path of this machine gets into the manifest
        with CorpusWriter(Path("corpus"), np.uint16) as writer:
            writer.add_document(np.random.default_rng(1).integers(0, RUN.model.vocab_size, 500))
        tensors = gathered(run_ranks(LAYOUT.world_size, _train))
        (checkpoint,) = Path("checkpoints").glob("step-*")
        manifest = read_manifest(checkpoint)
        expected = {
            "format_version": FORMAT_VERSION,
            "checkpoint": checkpoint.name,
            "step": manifest.step,
            "generation": manifest.generation,
            "consumed_samples": manifest.consumed_samples,
            "tensors": {
                name: {"shape": list(values.shape), "dtype": values.dtype.name, "sha256": digest(values)}
                for name, values in sorted(tensors.items())
            },
        }
        target.mkdir()
        shutil.copytree(checkpoint, target / checkpoint.name)
        (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(f"{target}: {sum(p.stat().st_size for p in target.rglob('*') if p.is_file())} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
