"""Model FLOPs and MFU, by one convention, stated with every figure.

A token costs 6·N FLOPs in the matrices (2 in the forward pass, 4 in the backward pass, a matrix element) and, with L
layers, H = heads · head_dim and S the sequence length, in the score and value products of attention

    "full":   12·L·H·S   every position with every position, as PaLM counts it (Chowdhery et al. 2022, appendix B)
    "causal":  6·L·H·S   only the half that the causal mask leaves

N counts the matrices that each token is multiplied with: those of the layers and the language-model head, tied or not.
The look-ups of token and position embedding multiply nothing, nor do norms and biases (less than a thousandth at any
size worth training). GQA makes the key and value projections smaller, not the score and value products. What is
computed twice (recomputed activations) counts once.
"""

from __future__ import annotations

from engine.planning.config import ModelConfig


def _layer_matrices(model: ModelConfig) -> int:
    query = model.num_attention_heads * model.attention_head_dim
    key_value = model.kv_heads * model.attention_head_dim
    attention = model.hidden_size * (2 * query + 2 * key_value)
    products = 3 if model.activation == "swiglu" else 2
    return attention + products * model.hidden_size * model.ffn_hidden_size


def num_parameters(model: ModelConfig) -> int:
    """All trained parameters: embeddings, norms and biases in, a tied matrix once, padding of the vocabulary out."""
    query = model.num_attention_heads * model.attention_head_dim
    key_value = model.kv_heads * model.attention_head_dim
    norm = model.hidden_size * (2 if model.norm == "layernorm" else 1)
    layer = _layer_matrices(model) + 2 * norm
    if model.bias:
        inner = model.ffn_hidden_size * (2 if model.activation == "swiglu" else 1)
        layer += query + 2 * key_value + inner + 2 * model.hidden_size
    vocabulary = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    positions = model.max_sequence_length * model.hidden_size if model.position == "learned" else 0
    return model.num_layers * layer + norm + vocabulary + positions


def num_matrix_parameters(model: ModelConfig) -> int:
    """N of the convention above."""
    return model.num_layers * _layer_matrices(model) + model.vocab_size * model.hidden_size


def flops_per_token(model: ModelConfig, sequence_length: int, *, causal: bool) -> int:
    """Model FLOPs of forward and backward for one token, by the convention "causal" or "full" (see above)."""
    width = model.num_attention_heads * model.attention_head_dim
    products = (6 if causal else 12) * model.num_layers * width * sequence_length
    return 6 * num_matrix_parameters(model) + products


def mfu(
    model: ModelConfig,
    sequence_length: int,
    *,
    tokens_per_s: float,
    num_devices: int,
    peak_flops: float,
    causal: bool = False,
) -> float:
    """Model FLOPs utilisation as a fraction: of ``num_devices`` devices of ``peak_flops`` FLOP/s each.

    ``tokens_per_s`` is of all devices together. Raises ValueError when the peak is not known (not above 0).
    """
    if peak_flops <= 0:
        raise ValueError(f"peak_flops {peak_flops}: MFU needs the peak of the device")
    return tokens_per_s * flops_per_token(model, sequence_length, causal=causal) / (num_devices * peak_flops)
