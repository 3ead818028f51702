"""Small models of both families, and checkpoints of them with values that would be missed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.initial_checkpoint import write_initial_checkpoint
from engine.models.global_shapes import global_shapes
from engine.planning.config import ModelConfig

VOCAB = 1003


def llama(**settings: object) -> ModelConfig:
    """GQA 4/2, vocabulary 1003, two layers."""
    values: dict[str, object] = {
        "num_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "ffn_hidden_size": 80,
        "vocab_size": VOCAB,
        "max_sequence_length": 40,
        "rope_theta": 5000.0,
        "norm_epsilon": 1e-6,
    }
    return ModelConfig.model_validate({**values, **settings})


def gpt2(**settings: object) -> ModelConfig:
    """Vocabulary 1003, two layers, tied."""
    values: dict[str, object] = {
        "num_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "ffn_hidden_size": 144,
        "vocab_size": VOCAB,
        "max_sequence_length": 40,
        "position": "learned",
        "norm": "layernorm",
        "activation": "gelu",
        "bias": True,
        "tie_embeddings": True,
    }
    return ModelConfig.model_validate({**values, **settings})


def weights_of(model: ModelConfig) -> dict[str, Tensor]:
    """Random global tensors, norms around 1."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.empty(shape).normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2, generator=generator)
        for name, shape in global_shapes(model).items()
    }


def checkpoint_of(model: ModelConfig, directory: Path) -> Path:
    """A checkpoint with ``weights_of(model)`` in the new ``directory``."""
    directory.mkdir(parents=True)
    write_initial_checkpoint(directory, model, weights_of(model).items(), job="test")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}
