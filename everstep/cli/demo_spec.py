"""The demo's job: a Llama-style decoder of 3 M parameters on the standard library's source text."""

from __future__ import annotations

from typing import Any

from everstep.cli.demo_corpus import CORPUS_PATH, VOCAB_SIZE

SAVE_INTERVAL = 10


def demo_spec(name: str, steps: int, directory: str) -> dict[str, Any]:
    """The spec as it is submitted; ``directory`` is where checkpoints go, below the data root."""
    return {
        "name": name,
        "model": {
            "num_layers": 4,
            "hidden_size": 192,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "ffn_hidden_size": 512,
            "vocab_size": VOCAB_SIZE,
            "max_sequence_length": 128,
        },
        "data": {"path": CORPUS_PATH},
        "train": {
            "sequence_length": 128,
            "global_batch_size": 8,
            "train_steps": steps,
            "lr": 1e-3,
            "min_lr": 1e-4,
            "warmup_steps": max(1, steps // 10),
            "log_samples": True,
        },
        "checkpoint": {"directory": directory, "save_interval": SAVE_INTERVAL, "keep": 2},
        "layout": {"tp": 2, "pp": 2, "dp": 2},
        "resources": {"ranks": 8, "min_ranks": 2},
    }
