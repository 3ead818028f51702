"""GPT-2 and Llama of ``transformers``, randomly filled, give the same logits as ours with the same weights (fp32)."""

import os

import pytest
import torch

from engine.models.transformer import Stage
from engine.parameters import spec_of
from engine.planning.config import ModelConfig
from engine.planning.layout import Layout
from tests.harness import groups_of, run_ranks
from tests.weights import fill

LLAMA = ModelConfig(
    num_layers=3,
    hidden_size=48,
    num_attention_heads=6,
    num_key_value_heads=2,
    ffn_hidden_size=80,
    vocab_size=131,
    max_sequence_length=40,
    rope_theta=5000.0,
    norm_epsilon=1e-6,
)
GPT2 = ModelConfig(
    num_layers=3,
    hidden_size=48,
    num_attention_heads=4,
    ffn_hidden_size=192,
    vocab_size=131,
    max_sequence_length=40,
    position="learned",
    norm="layernorm",
    activation="gelu",
    bias=True,
    tie_embeddings=True,
)


def _scatter_parameters(theirs):
    """Give every weight, norms and biases too, a value that would be missed."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in theirs.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.2, generator=generator)


def _llama(model):
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.kv_heads,
            max_position_embeddings=model.max_sequence_length,
            rms_norm_eps=model.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
            tie_word_embeddings=model.tie_embeddings,
        )
    )
    assert theirs.config.rope_parameters["rope_theta"] == model.rope_theta
    _scatter_parameters(theirs)
    state = theirs.state_dict()
    ours = {
        "embedding.tokens.weight": state["model.embed_tokens.weight"],
        "final_norm.weight": state["model.norm.weight"],
        "head.weight": state["lm_head.weight"],
    }
    parts = {
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
    for layer in range(model.num_layers):
        for mine, other in parts.items():
            ours[f"layers.{layer}.{mine}.weight"] = state[f"model.layers.{layer}.{other}.weight"]
    return theirs, ours


def _gpt2(model):
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=model.vocab_size,
            n_positions=model.max_sequence_length,
            n_embd=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_attention_heads,
            n_inner=model.ffn_hidden_size,
            layer_norm_epsilon=model.norm_epsilon,
        )
    ).eval()
    assert theirs.config.activation_function == "gelu_new"
    _scatter_parameters(theirs)
    state = theirs.state_dict()
    ours = {
        "embedding.tokens.weight": state["transformer.wte.weight"],
        "embedding.positions.weight": state["transformer.wpe.weight"],
    }

    def take(mine, other, transposed=False):
        for kind in ("weight", "bias"):
            value = state[f"transformer.{other}.{kind}"]
            ours[f"{mine}.{kind}"] = value.t() if transposed and kind == "weight" else value

    take("final_norm", "ln_f")
    for layer in range(model.num_layers):
        take(f"layers.{layer}.attention_norm", f"h.{layer}.ln_1")
        take(f"layers.{layer}.mlp_norm", f"h.{layer}.ln_2")
        take(f"layers.{layer}.attention.output", f"h.{layer}.attn.c_proj", transposed=True)
        take(f"layers.{layer}.mlp.up", f"h.{layer}.mlp.c_fc", transposed=True)
        take(f"layers.{layer}.mlp.down", f"h.{layer}.mlp.c_proj", transposed=True)
        for kind in ("weight", "bias"):  # theirs keeps the three side by side and stores [in, out]
            parts = state[f"transformer.h.{layer}.attn.c_attn.{kind}"].t().chunk(3)
            for part, value in zip(("query", "key", "value"), parts, strict=True):
                ours[f"layers.{layer}.attention.{part}.{kind}"] = value
    return theirs, ours


def _difference(rank, store, model):
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.manual_seed(0)
    theirs, weights = (_gpt2 if model.position == "learned" else _llama)(model)
    stage = Stage(model, groups_of(Layout(), rank, store), dtype=torch.float32, device=torch.device("cpu"))
    used = set()
    for parameter in stage.parameters():
        fill(parameter, spec_of(parameter), lambda segment: used.add(segment.name) or weights[segment.name])
    assert used == set(weights)
    tokens = torch.randint(0, model.vocab_size, (2, model.max_sequence_length))
    with torch.no_grad():
        expected = theirs(tokens).logits.transpose(0, 1)
    assert expected.std() > 0.5
    return (stage.logits(tokens) - expected).abs().max().item() / expected.abs().max().item()


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_logits_equal_those_of_transformers(model):
    [difference] = run_ranks(1, _difference, model, timeout_s=120)
    assert difference < 1e-5
