"""Tensor-parallel linear layers and the cross entropy, against the same mathematics in one piece (fp64)."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from engine.planning.layout import Layout
from engine.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from engine.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from tests.harness import groups_of, run_ranks

CPU = torch.device("cpu")


def _random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _linears(rank, store, tp):
    group = groups_of(Layout(tp=tp), rank, store).tp
    options = {"bias": True, "group": group, "dtype": torch.float64, "device": CPU}
    column = ColumnParallelLinear(6, {"a": 8, "b": 4}, **options)
    row = RowParallelLinear(12, 5, name="c", init="normal", **options)
    whole = {"a": _random(8, 6, seed=1), "b": _random(4, 6, seed=2), "c": _random(5, 12, seed=3)}
    bias = {"a": _random(8, seed=4), "b": _random(4, seed=5), "c": _random(5, seed=6)}
    # The inner features of this rank: its share of a, then its share of b.
    a = torch.arange(8).chunk(tp)[group.rank]
    b = torch.arange(4).chunk(tp)[group.rank]
    inner = torch.cat([a, 8 + b])
    fused, fused_bias = torch.cat([whole["a"], whole["b"]]), torch.cat([bias["a"], bias["b"]])
    with torch.no_grad():
        column.weight.copy_(fused[inner])
        column.bias.copy_(fused_bias[inner])
        row.weight.copy_(whole["c"][:, inner])
        row.bias.copy_(bias["c"])
    x = _random(3, 2, 6, seed=7).requires_grad_()
    up = _random(3, 2, 5, seed=8)
    y = row(column(x).tanh())
    y.backward(up)

    leaves = [t.clone().requires_grad_() for t in (x.detach(), fused, fused_bias, whole["c"], bias["c"])]
    expected = F.linear(F.linear(leaves[0], leaves[1], leaves[2]).tanh(), leaves[3], leaves[4])
    expected.backward(up)
    g_x, g_fused, g_bias, g_c, g_cbias = (leaf.grad for leaf in leaves)
    pairs = [
        (y, expected),
        (x.grad, g_x),
        (column.weight.grad, g_fused[inner]),
        (column.bias.grad, g_bias[inner]),
        (row.weight.grad, g_c[:, inner]),
        (row.bias.grad, g_cbias),
    ]
    assert all(ours.shape == theirs.shape for ours, theirs in pairs)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_column_then_row_parallel_equals_two_plain_linears(tp):
    assert max(run_ranks(tp, _linears, tp)) < 1e-13


def _frozen_input(rank, store):
    group = groups_of(Layout(tp=2), rank, store).tp
    column = ColumnParallelLinear(6, {"a": 8}, bias=False, group=group, dtype=torch.float32, device=CPU)
    torch.nn.init.normal_(column.weight)
    x = torch.ones(3, 6)
    column(x).sum().backward()
    return x.grad is None and column.weight.grad is not None


def test_an_input_without_gradient_costs_no_collective():
    assert run_ranks(2, _frozen_input) == [True, True]


VOCABULARY = 1003


def _cross_entropy(rank, store, tp, width, dtype):
    group = groups_of(Layout(tp=tp), rank, store).tp
    whole = _random(5, 3, VOCABULARY, dtype=dtype) * 4
    targets = torch.tensor([[0, 1, VOCABULARY - 1]] * 5).roll(1, 0)
    targets[1] = torch.tensor([500, 501, 502])
    padded = F.pad(whole, (0, tp * width - VOCABULARY), value=50.0)  # padding that would win every softmax
    local = padded[..., rank * width : (rank + 1) * width].clone().requires_grad_()
    weights = _random(5, 3, seed=9).to(torch.float32 if dtype == torch.bfloat16 else dtype)
    losses = vocab_parallel_cross_entropy(local, targets, VOCABULARY, group)
    (losses * weights).sum().backward()

    plain = whole.double().requires_grad_()
    expected = F.cross_entropy(plain.flatten(0, 1), targets.flatten(), reduction="none").view(5, 3)
    (expected * weights).sum().backward()
    assert losses.dtype == weights.dtype
    assert local.grad.dtype == dtype
    real = min(max(VOCABULARY - rank * width, 0), width)
    assert not local.grad[..., real:].any(), "padding has a gradient"
    gradient = plain.grad[..., rank * width : rank * width + real]
    return (
        (losses - expected).abs().max().item(),
        (local.grad[..., :real] - gradient).abs().max().item() if real else 0.0,
    )


@pytest.mark.parametrize(
    ("tp", "width", "dtype", "loss_tolerance", "gradient_tolerance"),
    [
        (1, 1003, torch.float64, 1e-12, 1e-13),
        (1, 1024, torch.float64, 1e-12, 1e-13),
        (2, 502, torch.float64, 1e-12, 1e-13),
        (4, 256, torch.float64, 1e-12, 1e-13),
        (2, 1024, torch.float64, 1e-12, 1e-13),  # the second rank holds nothing but padding
        (2, 502, torch.float32, 1e-5, 1e-6),
        (2, 502, torch.bfloat16, 1e-5, 1e-2),  # losses in fp32 from bf16 logits; the gradient is rounded to bf16
    ],
)
def test_cross_entropy_equals_that_of_whole_logits(tp, width, dtype, loss_tolerance, gradient_tolerance):
    for loss_error, gradient_error in run_ranks(tp, _cross_entropy, tp, width, dtype):
        assert loss_error < loss_tolerance
        assert gradient_error < gradient_tolerance


def _extremes(rank, store):
    group = groups_of(Layout(tp=2), rank, store).tp
    logits = torch.full((4, 8), -1e4)
    logits[0, 0] = 1e4 if rank == 0 else -1e4
    logits.requires_grad_()
    targets = torch.tensor([0, 15, 13, -1])  # 13 true columns: 13 and 15 are padding
    losses = vocab_parallel_cross_entropy(logits, targets, 13, group)
    losses.sum().backward()
    return losses.detach().numpy(), logits.grad.numpy()


def test_large_logits_stay_finite_and_a_target_outside_the_vocabulary_is_nan():
    for losses, gradients in run_ranks(2, _extremes):
        assert losses[0] == 0.0
        assert np.isnan(losses[1:]).all()
        assert np.isfinite(gradients[0]).all()
        assert np.isnan(gradients[1:, :5]).all()


def _kept_for_backward(rank, store):
    group = groups_of(Layout(), rank, store).tp
    logits = torch.randn(64, 1000, dtype=torch.bfloat16).requires_grad_()
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        vocab_parallel_cross_entropy(logits, torch.zeros(64, dtype=torch.int64), 1000, group)
    return sum(sizes), logits.numel() * logits.element_size()


def test_cross_entropy_keeps_the_logits_and_two_numbers_a_token():
    [(kept, logits)] = run_ranks(1, _kept_for_backward)
    assert kept == logits + 64 * (4 + 8)
