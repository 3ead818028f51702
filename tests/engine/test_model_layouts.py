"""One step of the model in many layouts equals the plain one-process model: loss, logits, every gradient, every weight.

Stages are chained by hand here. The fp64 tolerance leaves room for rounding alone; the fp32 one is some hundred times
the rounding of one sum.
"""

from functools import cache

import numpy as np
import pytest
import torch

from engine.models.transformer import Stage
from engine.parameters import spec_of
from engine.planning.config import ModelConfig
from engine.planning.layout import Layout
from tests.harness import groups_of, run_ranks
from tests.reference import initial_weights, reference_model
from tests.weights import initialise

SEED = 7
SEQUENCE, BATCH = 16, 2
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def _model(**settings):
    defaults = {
        "num_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "vocab_size": 1003,
        "max_sequence_length": 24,
        "init_std": 0.1,  # large enough that every part of the model matters to the loss
    }
    return ModelConfig(**{**defaults, **settings})


LLAMA = _model(num_key_value_heads=2)
LLAMA_TIED = _model(
    num_attention_heads=8, num_key_value_heads=4, head_dim=6, tie_embeddings=True, vocab_padding_multiple=1
)
GPT2 = _model(position="learned", norm="layernorm", activation="gelu", bias=True, tie_embeddings=True)
GPT2_UNTIED = GPT2.model_copy(update={"tie_embeddings": False, "vocab_padding_multiple": 1})
TINY_VOCABULARY = GPT2.model_copy(update={"vocab_size": 100, "num_layers": 2})  # three of four TP ranks: only padding

CASES = [
    (LLAMA, Layout()),
    (LLAMA, Layout(tp=2)),
    (LLAMA, Layout(pp=2)),  # uneven: 2 layers and 1
    (LLAMA, Layout(tp=2, pp=3)),
    (LLAMA_TIED, Layout()),
    (LLAMA_TIED, Layout(tp=4)),
    (LLAMA_TIED, Layout(pp=2, stage_layers=(1, 2))),
    (GPT2, Layout()),
    (GPT2, Layout(tp=4)),
    (GPT2, Layout(tp=2, pp=2)),
    (GPT2_UNTIED, Layout(tp=4)),
    (TINY_VOCABULARY, Layout(tp=4)),
]


def _name(value):
    if isinstance(value, ModelConfig):
        names = ("LLAMA", "LLAMA_TIED", "GPT2", "GPT2_UNTIED", "TINY_VOCABULARY")
        return next(name for name in names if globals()[name] is value)
    return str(value)


def _tokens(model):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.vocab_size, (BATCH, SEQUENCE + 1), generator=generator)


def _step(rank, store, layout, model, dtype):
    groups = groups_of(layout, rank, store)
    stage = Stage(model, groups, dtype=dtype, device=torch.device("cpu"))
    initialise(stage, model, SEED)
    tokens = _tokens(model)
    here, pp = groups.at.pp, groups.pp
    if groups.is_first_stage:
        inputs = tokens[:, :-1]
    else:
        inputs = torch.empty(SEQUENCE, BATCH, model.hidden_size, dtype=dtype)
        pp.receive(inputs, here - 1).wait()
        inputs.requires_grad_()
    output = stage(inputs, tokens[:, 1:])
    answer = {"rank": rank, "loss": None, "logits": None}
    if groups.is_last_stage:
        assert output.shape == ()
        answer["loss"] = output.item()
        answer["logits"] = stage.logits(inputs.detach()).numpy()
        output.backward()
    else:
        assert output.shape == (SEQUENCE, BATCH, model.hidden_size)
        pp.send(output.detach(), here + 1).wait()
        gradient = torch.empty_like(output)
        pp.receive(gradient, here + 1).wait()
        output.backward(gradient)
    if not groups.is_first_stage:
        pp.send(inputs.grad, here - 1).wait()
    shared = stage.shared_embedding
    if shared is not None:
        groups.embedding.all_reduce(shared.grad).wait()

    answer["boxes"], answer["padding"] = [], []
    for parameter in stage.parameters():
        spec = spec_of(parameter)
        covered = 0
        for segment in spec.segments:
            rows = slice(segment.row, segment.row + segment.size[0])
            covered += segment.size[0]
            box = tuple(slice(o, o + s) for o, s in zip(segment.offset, segment.size, strict=True))
            values, gradients = parameter.detach()[rows].numpy(), parameter.grad[rows].numpy()
            answer["boxes"].append((segment.name, segment.global_shape, box, values, gradients, spec.decay))
        answer["padding"].append((parameter.detach()[covered:].numpy(), parameter.grad[covered:].numpy()))
    return answer


def _gather(answers):
    """Values and gradients by global name; boxes that several ranks hold must have the same bits."""
    whole = {}
    for answer in answers:
        for name, shape, box, *parts, _ in answer["boxes"]:
            for kind, part in zip(("value", "gradient"), parts, strict=True):
                tensor = whole.setdefault((kind, name), np.full(shape, np.nan, part.dtype))
                there = tensor[box]
                assert np.isnan(there).all() or np.array_equal(there, part), (answer["rank"], name, kind)
                tensor[box] = part
    assert not any(np.isnan(tensor).any() for tensor in whole.values()), "some box belongs to nobody"
    return [{name: t for (kind, name), t in whole.items() if kind == wanted} for wanted in ("value", "gradient")]


def _reference_step(rank, store, model, dtype):
    reference = reference_model(model, SEED, dtype)
    loss = reference.loss_sum(_tokens(model))
    loss.backward()
    logits = reference.logits(_tokens(model)[:, :-1]).detach().transpose(0, 1)
    return loss.item(), logits.numpy(), {name: p.grad.numpy() for name, p in reference.named_parameters()}


@cache
def _expected(model, dtype):
    return run_ranks(1, _reference_step, model, dtype)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(("model", "layout"), CASES, ids=_name)
def test_a_step_equals_the_one_process_model(model, layout, dtype):
    loss, logits, gradients = _expected(model, dtype)
    answers = run_ranks(layout.world_size, _step, layout, model, dtype)
    tolerance = TOLERANCE[dtype]

    ends = [a for a in answers if a["loss"] is not None]
    assert len(ends) == layout.tp
    for end in ends:
        assert end["loss"] == pytest.approx(loss, rel=tolerance)
        assert end["loss"] == ends[0]["loss"], "TP ranks must agree to the bit"
        assert end["logits"].shape == (SEQUENCE, BATCH, model.vocab_size)
        np.testing.assert_allclose(end["logits"], logits, rtol=0, atol=tolerance * np.abs(logits).max())

    values, ours = _gather(answers)
    start = initial_weights(model, SEED)
    assert values.keys() == gradients.keys()
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert np.array_equal(values[name], start[name].to(dtype).numpy()), f"{name}: another start in this layout"
        # The softmax does not see the bias of a key: its gradient is rounding alone, so there is a floor.
        atol = tolerance * max(np.abs(gradient).max(), 1e-2 * largest)
        np.testing.assert_allclose(ours[name], gradient, rtol=0, atol=atol, err_msg=name, strict=True)

    for answer in answers:
        assert not any(np.any(part) for pair in answer["padding"] for part in pair), "padding is zero, its gradient too"
        for name, shape, *_, decay in answer["boxes"]:
            assert decay == (len(shape) > 1), name


def test_padding_multiple_sets_how_many_rows_are_padding():
    for multiple, tp, rows in ((1, 1, 1003), (1, 2, 1004), (128, 1, 1024), (128, 4, 1024), (128, 3, 1152)):
        model = LLAMA.model_copy(update={"vocab_padding_multiple": multiple})
        assert model.padded_vocab_size(tp) == rows
