"""What else the other rooms rely on: order of parameters, bf16 with fp32 inside, tied embeddings, refused layouts."""

import pytest
import torch
from torch.nn import functional as F

from engine.models.transformer import Stage
from engine.parameters import spec_of
from engine.planning.config import ModelConfig, TrainConfig
from engine.planning.flops import num_parameters
from engine.planning.layout import Layout, illegal_reasons
from engine.planning.presets import PRESETS, preset
from tests.harness import groups_of, run_ranks
from tests.reference import initial_weights
from tests.weights import initialise

CPU = torch.device("cpu")


def _stage(groups, model, dtype=torch.float32):
    stage = Stage(model, groups, dtype=dtype, device=CPU)
    initialise(stage, model, seed=1)
    return stage


def _orders(rank, store, model):
    stage = _stage(groups_of(Layout(), rank, store), model)
    used, ready = [], []
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    for module in stage.modules():
        own = [names[id(p)] for p in module.parameters(recurse=False)]
        if own:
            module.register_forward_pre_hook(lambda _, __, own=own: used.extend(own))
    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: ready.append(names[id(p)]))
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    stage(tokens[:, :-1], tokens[:, 1:]).backward()
    return list(names.values()), list(dict.fromkeys(used)), ready


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_parameters_are_in_the_order_of_use_and_each_gradient_is_ready_once(name):
    [(declared, used, ready)] = run_ranks(1, _orders, preset(name))
    assert used == declared
    assert sorted(ready) == sorted(declared)


def _bf16(rank, store, layout, model):
    groups = groups_of(layout, rank, store)
    stage = _stage(groups, model, torch.bfloat16)
    assert {p.dtype for p in stage.parameters()} == {torch.bfloat16}
    tokens = torch.arange(2 * 33).view(2, 33) * 7 % model.vocab_size
    loss = stage(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in stage.parameters())
    single = _stage(groups, model)
    return str(loss.dtype), loss.item(), single(tokens[:, :-1], tokens[:, 1:]).item()


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_bf16_sums_losses_in_fp32_and_is_near_fp32(name):
    for dtype, loss, exact in run_ranks(2, _bf16, Layout(tp=2), preset(name)):
        assert dtype == "torch.float32"
        assert loss == pytest.approx(exact, rel=2e-3)


def test_torchs_norms_compute_in_fp32_for_bf16_activations():
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(50, 96, generator=generator) * 3 + 1).bfloat16()
    weight, bias = (torch.randn(2, 96, generator=generator)).bfloat16()
    wide, (wide_weight, wide_bias) = x.double(), (weight.double(), bias.double())
    for got, exact in (
        (F.rms_norm(x, (96,), weight, 1e-5), F.rms_norm(wide, (96,), wide_weight, 1e-5)),
        (F.layer_norm(x, (96,), weight, bias, 1e-5), F.layer_norm(wide, (96,), wide_weight, wide_bias, 1e-5)),
    ):
        # Half a unit in the last place of bf16: only the result is rounded to it.
        torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-5)


def _tied(rank, store, model):
    stage = _stage(groups_of(Layout(pp=3), rank, store), model)
    shared = stage.shared_embedding
    spec = None if shared is None else spec_of(shared)
    return spec and (spec.shared_embedding, spec.owned, spec.segments[0].name)


def test_tied_embedding_is_on_both_ends_and_owned_by_the_first():
    name = "embedding.tokens.weight"
    assert run_ranks(3, _tied, preset("gpt2-tiny")) == [(True, True, name), None, (True, False, name)]
    assert run_ranks(3, _tied, preset("llama-tiny")) == [None, None, None]


def test_num_parameters_counts_what_the_model_has():
    models = [preset("gpt2-tiny"), preset("llama-tiny")]
    models += [model.model_copy(update={"tie_embeddings": not model.tie_embeddings}) for model in models]
    models.append(models[1].model_copy(update={"bias": True, "head_dim": 20, "norm": "layernorm"}))
    for model in models:
        assert num_parameters(model) == sum(w.numel() for w in initial_weights(model, seed=1).values())


def test_presets_are_the_sizes_that_their_names_say():
    for name, parameters in (
        ("gpt2-124m", 124_439_808),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama2-7b", 6_738_415_616),
        ("mistral-7b", 7_248_023_552),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
    ):
        assert num_parameters(preset(name)) == parameters
    assert 2e6 < num_parameters(PRESETS["llama-demo"]) < 5e6
    with pytest.raises(ValueError, match="'llama-9b' is not one of gpt2-tiny, "):
        preset("llama-9b")


def test_four_tensor_ranks_for_two_key_value_heads_are_refused():
    train = TrainConfig(sequence_length=32, global_batch_size=8, train_steps=1)
    model = ModelConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        ffn_hidden_size=128,
        vocab_size=1003,
        max_sequence_length=32,
    )
    assert illegal_reasons(Layout(tp=2), model, train) == []
    assert illegal_reasons(Layout(tp=4), model, train) == [
        "model.num_key_value_heads 2 is not divisible by layout.tp 4"
    ]
