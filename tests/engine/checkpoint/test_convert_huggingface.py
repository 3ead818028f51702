"""Random models of ``transformers`` come in with the same logits and go out with the same bits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from engine.checkpoint.export_huggingface import export_huggingface
from engine.checkpoint.import_huggingface import import_huggingface
from engine.checkpoint.manifest import read_manifest
from engine.checkpoint.verify import verify
from engine.checkpoint.whole_weights import WholeWeights
from engine.models.global_shapes import global_shapes
from engine.models.huggingface import config_of, model_of
from engine.models.transformer import Stage
from engine.parameters import spec_of
from engine.planning.config import ModelConfig
from engine.planning.layout import Layout
from tests.engine.checkpoint.small_models import gpt2, llama
from tests.harness import groups_of, run_ranks
from tests.weights import fill


def _theirs(model: ModelConfig):
    """A model of ``transformers`` in which every weight, norms and biases too, has a value that would be missed."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if model.position == "learned":
        config = GPT2Config(
            vocab_size=model.vocab_size,
            n_positions=model.max_sequence_length,
            n_embd=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_attention_heads,
            n_inner=model.ffn_hidden_size,
            layer_norm_epsilon=model.norm_epsilon,
            tie_word_embeddings=model.tie_embeddings,
        )
        theirs = GPT2LMHeadModel(config)
    else:
        config = LlamaConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.kv_heads,
            head_dim=model.attention_head_dim,
            max_position_embeddings=model.max_sequence_length,
            rms_norm_eps=model.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
            tie_word_embeddings=model.tie_embeddings,
            attention_bias=model.bias,
            mlp_bias=model.bias,
        )
        theirs = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in theirs.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.2, generator=generator)
    return theirs.eval()


def our_logits(checkpoint: Path, groups, tokens):
    """[batch, seq, vocab] of the checkpoint's model, computed by our own stage."""
    weights = WholeWeights(checkpoint)
    stage = Stage(weights.model, groups, dtype=torch.float32, device=torch.device("cpu"))
    for parameter in stage.parameters():
        fill(parameter, spec_of(parameter), lambda segment: weights.read(segment.name))
    weights.close()
    return stage.logits(tokens).transpose(0, 1), {
        segment.name: segment.global_shape for p in stage.parameters() for segment in spec_of(p).segments
    }


def their_logits(directory: Path, tokens):
    """[batch, seq, vocab] of what ``transformers`` loads, and its state."""
    from transformers import AutoModelForCausalLM

    loaded, told = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(told.get(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert loaded.dtype == torch.float32
    with torch.no_grad():
        return loaded.eval()(tokens).logits, loaded.state_dict()


def _there_and_back(rank, store, model, directory):
    os.environ["HF_HUB_OFFLINE"] = "1"
    theirs = _theirs(model)
    theirs.save_pretrained(directory / "theirs", max_shard_size="100KB")
    assert (directory / "theirs" / "model.safetensors.index.json").exists()
    config = json.loads((directory / "theirs" / "config.json").read_text())
    assert model_of(config) == model
    tokens = torch.randint(0, model.vocab_size, (2, model.max_sequence_length))
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert expected.std() > 0.5
    scale = expected.abs().max().item()

    checkpoint = directory / "checkpoints" / "step-000000000.g0"
    seen = []
    told = import_huggingface(directory / "theirs", checkpoint, on_progress=seen.append)
    assert told.parameters == sum(p.numel() for p in theirs.parameters())
    assert seen[-1].bytes_done == seen[-1].bytes_total == 4 * told.parameters and seen[0].bytes_done == 0
    assert verify(checkpoint) == []
    ours, shapes = our_logits(checkpoint, groups_of(Layout(), rank, store), tokens)
    assert shapes == global_shapes(model)
    differences = [(ours - expected).abs().max().item() / scale]

    for name, limit in (("whole", 10**9), ("sharded", 100_000)):
        export_huggingface(checkpoint, directory / name, max_shard_bytes=limit)
        logits, state = their_logits(directory / name, tokens)
        differences.append((logits - expected).abs().max().item() / scale)
        original = theirs.state_dict()
        assert state.keys() == original.keys()
        for key, value in original.items():
            assert torch.equal(state[key].view(torch.int32), value.view(torch.int32)), key
        back = directory / f"again-{name}"
        import_huggingface(directory / name, back)
        assert read_manifest(back).tensors == read_manifest(checkpoint).tensors
        export_huggingface(back, directory / f"out-{name}")
        assert (directory / f"out-{name}" / "model.safetensors").read_bytes() == (
            directory / "whole" / "model.safetensors"
        ).read_bytes()
    assert json.loads((directory / "whole" / "config.json").read_text()) == config_of(model, "float32")
    files = sorted((directory / "sharded").glob("model-*.safetensors"))
    index = json.loads((directory / "sharded" / "model.safetensors.index.json").read_text())
    assert len(files) >= 3 and {file.name for file in files} == set(index["weight_map"].values())
    largest = model.vocab_size * model.hidden_size * 4
    assert max(file.stat().st_size for file in files) < largest + 4096
    return differences


@pytest.mark.parametrize(
    "model",
    [
        gpt2(),
        gpt2(tie_embeddings=False),
        llama(),
        llama(tie_embeddings=True),
        llama(bias=True, head_dim=16),
    ],
    ids=["gpt2-tied", "gpt2-untied", "llama-untied", "llama-tied", "llama-bias-head-dim"],
)
def test_logits_there_and_back_and_bits_back(tmp_path, model):
    [differences] = run_ranks(1, _there_and_back, model, tmp_path, timeout_s=120)
    assert max(differences) < 1e-5
    assert differences[1:] == [0.0, 0.0]  # what went out is what came in


def _half(rank, store, model, directory):
    os.environ["HF_HUB_OFFLINE"] = "1"
    theirs = _theirs(model).bfloat16()
    theirs.save_pretrained(directory / "theirs")
    import_huggingface(directory / "theirs", directory / "checkpoint")
    export_huggingface(directory / "checkpoint", directory / "back", dtype="bf16")
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(directory / "back")
    assert loaded.dtype == torch.bfloat16
    original = theirs.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value.view(torch.int16), original[name].view(torch.int16)), name
    export_huggingface(directory / "checkpoint", directory / "half", dtype="fp16")
    assert AutoModelForCausalLM.from_pretrained(directory / "half").dtype == torch.float16


def test_bf16_weights_come_back_bit_by_bit(tmp_path):
    run_ranks(1, _half, llama(), tmp_path, timeout_s=120)
