"""Model shapes by name. Any of them can be the start of another: ``preset("llama-8b").model_copy(update=...)``."""

from __future__ import annotations

from engine.planning.config import ModelConfig


def _gpt2(
    num_layers: int, hidden_size: int, heads: int, *, vocab_size: int = 50257, max_sequence_length: int = 1024
) -> ModelConfig:
    """GPT-2 (Radford et al. 2019)."""
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        ffn_hidden_size=4 * hidden_size,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        position="learned",
        norm="layernorm",
        activation="gelu",
        bias=True,
        tie_embeddings=True,
    )


def _llama(
    num_layers: int,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    ffn_hidden_size: int,
    vocab_size: int,
    max_sequence_length: int,
    *,
    rope_theta: float = 10_000.0,
) -> ModelConfig:
    """Llama (Touvron et al. 2023): RoPE, RMSNorm, SwiGLU, no biases, untied."""
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        rope_theta=rope_theta,
    )


PRESETS: dict[str, ModelConfig] = {
    "gpt2-tiny": _gpt2(4, 64, 4, vocab_size=1003, max_sequence_length=128),
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-355m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    "llama-tiny": _llama(4, 64, 4, 2, 192, 1003, 128),
    "llama-demo": _llama(6, 192, 8, 4, 512, 4096, 512),
    "llama-1.3b": _llama(24, 2048, 16, 16, 5632, 32768, 4096),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32768, 32768, rope_theta=1_000_000.0),
    "llama-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192, rope_theta=500_000.0),
    "llama-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192, rope_theta=500_000.0),
}
"""``llama-8b`` and ``llama-70b`` have the sizes of Llama 3, ``mistral-7b`` those of Mistral 7B v0.3."""


def preset(name: str) -> ModelConfig:
    """The model of that name; raises ValueError that lists the names when there is none."""
    if name not in PRESETS:
        raise ValueError(f"model {name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]
