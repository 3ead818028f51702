"""Train a few steps in a layout, as the agent's ranks do, and read back what the run wrote."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from engine.agent_link import AgentLink
from engine.planning.config import CheckpointConfig, CorpusConfig, ModelConfig, RunConfig, TrainConfig
from engine.planning.layout import Layout
from engine.planning.messages import GenerationStart, Meeting, RankLaunch, RestorePoint
from engine.rank import run
from engine.telemetry import Telemetry
from tests.harness import run_ranks


def tiny_run(corpus: str, directory: Path, *, model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    """GQA, SwiGLU, RoPE, untied, vocabulary 1003; settings of the model and the training can be overridden."""
    return RunConfig(
        model=ModelConfig(
            **{
                "num_layers": 4,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "ffn_hidden_size": 128,
                "vocab_size": 1003,
                "max_sequence_length": 64,
                **(model or {}),
            }
        ),
        data=CorpusConfig(path=corpus),
        train=TrainConfig(
            **{
                "sequence_length": 32,
                "global_batch_size": 8,
                "train_steps": 10,
                "lr": 1e-3,
                "warmup_steps": 2,
                "log_samples": True,
                **train,
            }
        ),
        checkpoint=CheckpointConfig(directory=str(directory), save_interval=1000, keep=100),
    )


def launch_of(
    config: RunConfig,
    layout: Layout,
    rank: int,
    *,
    generation: int = 1,
    restore: RestorePoint | None = None,
    history: tuple[GenerationStart, ...] = (),
    device: str = "cpu",
) -> RankLaunch:
    """What an agent would tell this rank. With ``device`` "cuda" rank i computes on device i."""
    start = GenerationStart(generation=generation, start_step=restore.step if restore else 0)
    return RankLaunch(
        job="test",
        generation=generation,
        rank=rank,
        layout=layout,
        run=config,
        device=device if device == "cpu" else f"{device}:{rank}",
        meeting=Meeting(host="127.0.0.1", port=1, prefix="unused"),
        restore=restore,
        history=(*history, start),
        run_directory=config.checkpoint.directory,
        collective_timeout_s=60,
        launched_at=time.time(),
    )


def _rank(rank: int, store: Store, config: RunConfig, layout: Layout, kwargs: dict[str, Any]) -> int:
    launch = launch_of(config, layout, rank, **kwargs)
    link = AgentLink.connect(launch)
    telemetry = Telemetry(launch, link, torch.device(launch.device))
    return run(launch, store, link, telemetry).step


def train(config: RunConfig, layout: Layout, *, timeout_s: float = 150.0, **kwargs: Any) -> list[dict[str, Any]]:
    """Train ``config`` in ``layout`` with forked ranks; returns the metrics lines of the generation."""
    run_ranks(layout.world_size, _rank, config, layout, kwargs, timeout_s=timeout_s)
    return metrics(config, kwargs.get("generation", 1))


def metrics(config: RunConfig, generation: int) -> list[dict[str, Any]]:
    """The metrics lines that one generation wrote."""
    path = Path(config.checkpoint.directory) / "metrics" / f"g{generation:04d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def newest_checkpoint(config: RunConfig, step: int, generation: int = 1) -> RestorePoint:
    """The checkpoint that ``generation`` wrote after ``step`` steps."""
    directory = Path(config.checkpoint.directory) / "checkpoints" / f"step-{step:09d}.g{generation}"
    assert (directory / "manifest.json").exists()
    return RestorePoint(step=step, generation=generation, directory=str(directory))
