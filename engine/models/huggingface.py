"""``ModelConfig`` from and to the ``config.json`` of GPT-2 and Llama models in the Hugging Face format.

Plain dicts, without ``transformers``. What changes the mathematics and cannot be said in a ``ModelConfig`` is refused
with the field's name. What belongs to a training run or to text generation is not taken over: dropout, token ids.
Which tensor is which is in ``huggingface_weights.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from engine.planning.config import ModelConfig

Family = Literal["gpt2", "llama"]

_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")  # two names of the approximation by tanh
_DEFAULT_THETA = 10_000.0
_NO_IDS = {"bos_token_id": None, "eos_token_id": None}


def family_of(model: ModelConfig) -> Family:
    """Which of the two families ``model`` belongs to. Raises ValueError, with every field that fits neither."""
    family: Family = "gpt2" if model.position == "learned" else "llama"
    wanted: dict[str, Any]
    if family == "gpt2":
        wanted = {
            "norm": "layernorm",
            "activation": "gelu",
            "bias": True,
            "kv_heads": model.num_attention_heads,
            "attention_head_dim": model.hidden_size / model.num_attention_heads,
        }
    else:
        wanted = {"norm": "rmsnorm", "activation": "swiglu"}
    public = {"kv_heads": "num_key_value_heads", "attention_head_dim": "head_dim"}
    wrong = [
        f"model.{public.get(name, name)} is {getattr(model, name)!r}, {family} has {value!r}"
        for name, value in wanted.items()
        if getattr(model, name) != value
    ]
    if family == "llama" and model.hidden_size % model.num_attention_heads:
        wrong.append(f"model.hidden_size {model.hidden_size} is no multiple of its {model.num_attention_heads} heads")
    if wrong:
        raise ValueError(f"position {model.position!r} makes this a {family} model, but " + "; ".join(wrong))
    return family


def config_of(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of ``model`` whose weights are stored as ``dtype`` ("float32", "bfloat16", "float16").

    Raises ValueError when ``transformers`` has no such model in these families. Token ids are null: the weights do not
    know them, and the defaults of the families would name tokens of another vocabulary.
    """
    common: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        **_NO_IDS,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if family_of(model) == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_positions": model.max_sequence_length,
            "n_embd": model.hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "n_inner": model.ffn_hidden_size,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": model.norm_epsilon,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            **common,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.attention_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,  # read by transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},  # read by transformers 5
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "attention_dropout": 0.0,
        **common,
    }


def model_of(config: Mapping[str, Any]) -> ModelConfig:
    """The ``ModelConfig`` that a ``config.json`` describes. Raises ValueError with the field that cannot be had."""
    kind = config.get("model_type")
    if kind not in ("gpt2", "llama"):
        raise _refused("model_type", f"{kind!r} is not supported; gpt2 and llama are")
    if config.get("quantization_config") is not None:
        raise _refused("quantization_config", "quantized weights are not supported")
    return _from_gpt2(config) if kind == "gpt2" else _from_llama(config)


def _from_gpt2(config: Mapping[str, Any]) -> ModelConfig:
    _only(config, "activation_function", _GELU_TANH, default="gelu_new")
    _only(config, "scale_attn_weights", (True,), default=True)
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        _only(config, name, (False,), default=False)
    hidden = _integer(config, "n_embd", 768)
    return ModelConfig(
        num_layers=_integer(config, "n_layer", 12),
        hidden_size=hidden,
        num_attention_heads=_integer(config, "n_head", 12),
        ffn_hidden_size=_integer(config, "n_inner", 4 * hidden),
        vocab_size=_integer(config, "vocab_size", 50257),
        max_sequence_length=_integer(config, "n_positions", 1024),
        position="learned",
        norm="layernorm",
        norm_epsilon=_number(config, "layer_norm_epsilon", 1e-5),
        activation="gelu",
        bias=True,
        tie_embeddings=_flag(config, "tie_word_embeddings", True),
        init_std=_number(config, "initializer_range", 0.02),
    )


def _from_llama(config: Mapping[str, Any]) -> ModelConfig:
    _only(config, "hidden_act", ("silu", "swish"), default="silu")
    attention_bias, mlp_bias = (_flag(config, name, False) for name in ("attention_bias", "mlp_bias"))
    if attention_bias != mlp_bias:
        raise _refused("mlp_bias", f"{mlp_bias} beside attention_bias {attention_bias}: both or none have a bias here")
    hidden, heads = _integer(config, "hidden_size", 4096), _integer(config, "num_attention_heads", 32)
    head_dim = _integer(config, "head_dim", max(1, hidden // heads))
    return ModelConfig(
        num_layers=_integer(config, "num_hidden_layers", 32),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=_integer(config, "num_key_value_heads", heads),
        head_dim=None if head_dim * heads == hidden else head_dim,
        ffn_hidden_size=_integer(config, "intermediate_size", 11008),
        vocab_size=_integer(config, "vocab_size", 32000),
        max_sequence_length=_integer(config, "max_position_embeddings", 2048),
        rope_theta=_rope_theta(config),
        norm_epsilon=_number(config, "rms_norm_eps", 1e-6),
        bias=attention_bias,
        tie_embeddings=_flag(config, "tie_word_embeddings", False),
        init_std=_number(config, "initializer_range", 0.02),
    )


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The base of RoPE, wherever it stands: on its own, in ``rope_parameters`` or in ``rope_scaling``."""
    found = {}
    if config.get("rope_theta") is not None:
        found["rope_theta"] = _number(config, "rope_theta", _DEFAULT_THETA)
    for field in ("rope_parameters", "rope_scaling"):
        parameters = config.get(field)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            raise _refused(field, f"{parameters!r} is no object")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise _refused(field, f"RoPE of type {kind!r} is not supported, only 'default' is")
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise _refused(f"{field}.partial_rotary_factor", "only whole heads are turned here")
        if parameters.get("rope_theta") is not None:
            found[f"{field}.rope_theta"] = _number(parameters, "rope_theta", _DEFAULT_THETA, within=f"{field}.")
    _only(config, "partial_rotary_factor", (1.0,), default=1.0)
    if len(set(found.values())) > 1:
        raise _refused(" and ".join(found), f"they contradict each other: {list(found.values())}")
    return next(iter(found.values()), _DEFAULT_THETA)


def _refused(field: str, reason: str) -> ValueError:
    return ValueError(f"config.json: {field}: {reason}")


def _only(config: Mapping[str, Any], field: str, allowed: tuple[Any, ...], *, default: Any) -> None:
    value = config.get(field, default)
    if value is not None and value not in allowed:
        raise _refused(field, f"{value!r} is not supported, only {' or '.join(map(repr, allowed))} is")


def _integer(config: Mapping[str, Any], field: str, default: int) -> int:
    value = config.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refused(field, f"{value!r} is no positive integer")
    return value


def _number(config: Mapping[str, Any], field: str, default: float, *, within: str = "") -> float:
    value = config.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _refused(within + field, f"{value!r} is no positive number")
    return float(value)


def _flag(config: Mapping[str, Any], field: str, default: bool) -> bool:
    value = config.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _refused(field, f"{value!r} is neither true nor false")
    return value
