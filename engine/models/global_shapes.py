"""Names and shapes of a model's global tensors, without building the model. No torch here."""

from __future__ import annotations

from engine.planning.config import ModelConfig


def global_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each global tensor by name, in the order of the forward pass; matrices are [out, in].

    The vocabulary has its true size: padding is a matter of layouts. Tied embeddings are one tensor.
    """
    hidden, vocabulary = model.hidden_size, (model.vocab_size, model.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embedding.tokens.weight": vocabulary}
    if model.position == "learned":
        shapes["embedding.positions.weight"] = (model.max_sequence_length, hidden)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = (hidden,)
        if model.norm == "layernorm":
            shapes[f"{name}.bias"] = (hidden,)

    def linear(name: str, rows: int, columns: int) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if model.bias:
            shapes[f"{name}.bias"] = (rows,)

    query, kv = (heads * model.attention_head_dim for heads in (model.num_attention_heads, model.kv_heads))
    for layer in range(model.num_layers):
        name = f"layers.{layer}"
        norm(f"{name}.attention_norm")
        linear(f"{name}.attention.query", query, hidden)
        linear(f"{name}.attention.key", kv, hidden)
        linear(f"{name}.attention.value", kv, hidden)
        linear(f"{name}.attention.output", hidden, query)
        norm(f"{name}.mlp_norm")
        if model.activation == "swiglu":
            linear(f"{name}.mlp.gate", model.ffn_hidden_size, hidden)
        linear(f"{name}.mlp.up", model.ffn_hidden_size, hidden)
        linear(f"{name}.mlp.down", hidden, model.ffn_hidden_size)
    norm("final_norm")
    if not model.tie_embeddings:
        shapes["head.weight"] = vocabulary
    return shapes
