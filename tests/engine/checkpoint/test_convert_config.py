"""Settings of GPT-2 and Llama go both ways; what cannot be represented is refused with its field."""

from __future__ import annotations

import pytest

from engine.models.huggingface import config_of, model_of
from engine.models.huggingface_weights import weight_rules
from engine.planning.config import ModelConfig
from tests.engine.checkpoint.small_models import gpt2, llama

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
GPT2 = {"model_type": "gpt2"}


@pytest.mark.parametrize(
    "model",
    [gpt2(), gpt2(tie_embeddings=False), llama(), llama(tie_embeddings=True), llama(head_dim=16), llama(bias=True)],
)
def test_there_and_back_is_the_same_model(model):
    assert model_of(config_of(model, "float32")) == model


def test_fields_of_llama():
    config = config_of(llama(tie_embeddings=True), "bfloat16")
    assert config["architectures"] == ["LlamaForCausalLM"] and config["torch_dtype"] == "bfloat16"
    assert (config["vocab_size"], config["num_key_value_heads"], config["head_dim"]) == (1003, 2, 12)
    assert config["tie_word_embeddings"] is True and config["rope_theta"] == 5000.0
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000.0}
    assert config["bos_token_id"] is None and config["eos_token_id"] is None


def test_defaults_are_those_of_the_families():
    small = model_of(GPT2)
    assert (small.num_layers, small.hidden_size, small.ffn_hidden_size, small.vocab_size) == (12, 768, 3072, 50257)
    assert small.tie_embeddings and small.norm_epsilon == 1e-5
    assert model_of({**GPT2, "n_embd": 48, "n_inner": None}).ffn_hidden_size == 192
    seven_b = model_of({"model_type": "llama"})
    assert (seven_b.kv_heads, seven_b.attention_head_dim, seven_b.rope_theta) == (32, 128, 10000.0)
    assert not seven_b.tie_embeddings and seven_b.norm_epsilon == 1e-6


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 7e3},
        {"rope_theta": 7e3, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7e3}},
        {"rope_scaling": {"type": "default"}, "rope_theta": 7000},
        {"rope_parameters": {"rope_theta": 7e3}, "rope_theta": 7e3},
    ],
)
def test_rope_theta_is_found_wherever_it_stands(rope):
    assert model_of({**LLAMA, **rope}).rope_theta == 7000.0


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": "mistral"}, "model_type"),
        ({}, "model_type"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling"),
        ({**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters"),
        ({**LLAMA, "rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5e5}, "rope_theta and rope_parameters"),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({**LLAMA, "attention_bias": True}, "mlp_bias"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size"),
        ({**LLAMA, "hidden_size": True}, "hidden_size"),
        ({**LLAMA, "tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({**LLAMA, "rms_norm_eps": 0}, "rms_norm_eps"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config"),
        ({**GPT2, "activation_function": "relu"}, "activation_function"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_what_cannot_be_represented_is_refused_with_its_field(config, field):
    with pytest.raises(ValueError, match=field):
        model_of(config)


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (llama(norm="layernorm"), ["model.norm"]),
        (llama(activation="gelu"), ["model.activation"]),
        (llama(hidden_size=50, head_dim=12), ["model.hidden_size"]),
        (gpt2(num_key_value_heads=2), ["model.num_key_value_heads"]),
        (gpt2(head_dim=8), ["model.head_dim"]),
        (gpt2(bias=False, norm="rmsnorm"), ["model.bias", "model.norm"]),
    ],
)
def test_a_model_of_neither_family_is_refused_with_its_fields(model: ModelConfig, fields: list[str]):
    with pytest.raises(ValueError) as refused:
        config_of(model, "float32")
    assert all(field in str(refused.value) for field in fields)


def test_a_rule_takes_apart_what_it_put_together():
    import torch

    for model in (gpt2(), llama(bias=True)):
        for rule in weight_rules(model):
            theirs = torch.randn(rule.shape)
            parts = rule.split(theirs)
            assert [name for name, _ in parts] == list(rule.ours)
            assert torch.equal(rule.join([part for _, part in parts]), theirs)
