"""ZeRO-1 AdamW equals torch's AdamW in any layout, holds its share of the state and no more, and describes it fully."""

import pytest
import torch
from torch import nn

from engine.checkpoint.boxes import covers
from engine.data_parallel.buckets import ALIGNMENT, ParameterBuckets
from engine.data_parallel.distributed_optimizer import DistributedOptimizer
from engine.parameters import ParameterSpec, Segment, attach
from engine.planning.layout import Layout
from tests.harness import groups_of, run_ranks
from tests.toy_stages import BATCH, SEQ, ToyStage, micro_batch, name_of, parameter, settings
from tests.toy_training import BUCKET_MB, MICRO_BATCHES, Replica, whole_state


def _torch_adamw(rank, store, steps, train, tied):
    """The oracle: one process, torch's AdamW with parameter groups, a plain loop."""
    model = ToyStage(0, Layout(), tied=tied)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=train.lr,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        foreach=False,
    )
    norms, clipped = [], 0
    for step in range(steps):
        losses = 0.0
        for number in range(MICRO_BATCHES):
            loss = model(*micro_batch(step, number))
            (loss * (1.0 / (MICRO_BATCHES * BATCH * SEQ))).backward()
            losses += loss.item()
        norm = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt().item()
        if norm > train.clip_grad > 0:
            clipped += 1
            for p in model.parameters():
                p.grad.mul_(train.clip_grad / (norm + 1e-6))
        adamw.step()
        adamw.zero_grad()
        norms.append((norm, losses))
    moments = {
        f"{kind}/{name_of(p)}": adamw.state[p][kind].numpy()
        for p in model.parameters()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    weights = {f"weight/{name_of(p)}": p.detach().numpy() for p in model.parameters()}
    return norms, {**weights, **moments}, clipped


def _train(rank, store, layout, train, steps, tied):
    replica = Replica(rank, store, layout, train, tied=tied)
    norms = replica.run(steps)
    for name, _, _, values in replica.state():
        assert values.any(), name
    return norms, replica.weights(), replica.state()


STEPS = 20


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def oracle(request):
    train = settings(clip_grad=0.9)
    norms, tensors, clipped = run_ranks(1, _torch_adamw, STEPS, train, request.param)[0]
    assert 0 < clipped < STEPS, "some steps have to be clipped and some not"
    return request.param, train, norms, tensors


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(dp=2), Layout(dp=3), Layout(pp=2), Layout(pp=3), Layout(pp=2, dp=2)],
    ids=str,
)
def test_it_is_torch_adamw_with_decay_groups_and_clipping(layout, oracle):
    tied, train, norms, tensors = oracle
    ranks = run_ranks(layout.world_size, _train, layout, train, STEPS, tied)
    for ours, _, _ in ranks:
        assert ours == ranks[0][0], "ranks disagree about norm or loss"
        for (norm, loss), (expected_norm, expected_loss) in zip(ours, norms, strict=True):
            assert norm == pytest.approx(expected_norm, rel=1e-6)
            assert loss == pytest.approx(expected_loss, rel=1e-6)
    state = whole_state([pieces for _, _, pieces in ranks])
    assert state.keys() == tensors.keys()
    for name, expected in tensors.items():
        if layout.world_size == 1:
            assert torch.equal(state[name], torch.from_numpy(expected)), name
        torch.testing.assert_close(state[name], torch.from_numpy(expected), rtol=1e-6, atol=1e-7)
    # Every replica, and both copies of a tied embedding, hold the very weights that the pieces describe.
    for _, weights, _ in ranks:
        for name, values in weights.items():
            assert torch.equal(state[f"weight/{name}"], torch.from_numpy(values)), name


def _given_gradients(rank, store, layout, dtype):
    """A large parameter and small ones, whose gradients are given: compare with torch's AdamW after every step."""
    groups = groups_of(layout, rank, store)
    shapes = {"large": (97, 40), "small": (3,), "matrix": (13, 17), "tiny": (1,)}
    parameters = [parameter(name, shape, dtype) for name, shape in shapes.items()]
    twins = [nn.Parameter(p.detach().float().clone()) for p in parameters]
    buckets = ParameterBuckets(parameters, groups, bucket_size_mb=BUCKET_MB)
    slots = {slot.parameter: (bucket, slot) for bucket in buckets.buckets for slot in bucket.slots}
    train = settings(clip_grad=0.0)
    optimizer = DistributedOptimizer(buckets, groups, train)
    adamw = torch.optim.AdamW(
        [{"params": [p], "weight_decay": train.weight_decay if p.dim() > 1 else 0.0} for p in twins],
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        foreach=False,
    )
    for step in range(20):
        lr = 1e-2 / (1 + step)
        for number, (mine, twin) in enumerate(zip(parameters, twins, strict=True)):
            twin.grad = torch.randn(twin.shape, generator=torch.Generator().manual_seed(100 * step + number))
            bucket, slot = slots[mine]
            if rank == 0:  # the other replicas add zero, so sums have no rounding
                bucket.gradients[slot.start : slot.stop] = twin.grad.flatten()
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        buckets.finish()
        optimizer.step(lr)
        for mine, twin in zip(parameters, twins, strict=True):
            assert torch.equal(mine, twin.to(dtype)), (step, name_of(mine))
        masters = {name_of(mine): twin for mine, twin in zip(parameters, twins, strict=True)}
        for piece in optimizer.pieces():
            kind, name = piece.name.split("/")
            if kind == "weight":
                assert torch.equal(piece.data, masters[name].detach()[piece.box.slices]), (step, name)
    held = [sum(getattr(s, kind).numel() for s in optimizer._shards) for kind in ("exp_avg", "exp_avg_sq")]
    return held, sum(p.numel() for p in parameters), len(buckets.buckets), {p.name for p in optimizer.pieces()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(dp=3)], ids=str)
def test_shards_are_bit_equal_to_torch_and_a_rank_holds_its_share_only(layout, dtype):
    ranks = run_ranks(layout.dp, _given_gradients, layout, dtype)
    for held, numel, num_buckets, _ in ranks:
        padding = 4 * ALIGNMENT + num_buckets * ALIGNMENT * layout.dp
        for moment in held:
            assert moment <= (numel + padding) / layout.dp
    if layout.dp > 1:
        assert any("exp_avg/tiny" not in names for *_, names in ranks), "some rank holds nothing of a small parameter"


def _tensor_parallel_norm(rank, store):
    layout = Layout(tp=2, dp=2)
    groups = groups_of(layout, rank, store)
    half = Segment("cut", (4, 3), (2 * groups.at.tp, 0), (2, 3), 0, "normal")
    cut = attach(nn.Parameter(torch.zeros(2, 3)), ParameterSpec((2, 3), (half,)))
    norm = attach(
        nn.Parameter(torch.ones(3)),
        ParameterSpec((3,), (Segment("norm", (3,), (0,), (3,), 0, "ones"),), tp_replicated=True, decay=False),
    )
    buckets = ParameterBuckets([cut, norm], groups, bucket_size_mb=1.0)
    optimizer = DistributedOptimizer(buckets, groups, settings())
    cut.grad.fill_(1.0 + groups.at.tp)
    norm.grad.fill_(2.0)
    buckets.finish()
    total, extras = optimizer.step(1e-3, torch.tensor([float(rank), 1.0]))
    return total, extras.tolist(), [(p.name, p.box, p.owned) for p in optimizer.pieces()]


def test_norm_and_saves_count_every_parameter_once_over_tensor_parallel_ranks():
    ranks = run_ranks(4, _tensor_parallel_norm)
    # Two replicas: sums are twice the gradients. 6 elements of 2, 6 of 4, and once 3 of 4.
    expected = (6 * 2**2 + 6 * 4**2 + 3 * 4**2) ** 0.5
    for total, extras, _ in ranks:
        assert total == pytest.approx(expected, rel=1e-12)
        assert extras == [0 + 1 + 2 + 3, 4]
    for name, shape in (("weight/cut", (4, 3)), ("exp_avg/norm", (3,))):
        assert covers(shape, [box for *_, pieces in ranks for n, box, owned in pieces if n == name and owned])


def _not_finite(rank, store):
    replica = Replica(rank, store, Layout(dp=2), settings())
    replica.run(2)
    before = replica.weights(), replica.state()
    replica.backward(2)
    if rank == 1:
        replica.buckets.buckets[0].gradients[replica.buckets.buckets[0].shard][0] = float("nan")
    with pytest.raises(FloatingPointError, match="gradient norm of update 3 is nan"):
        replica.optimizer.step(1e-3)
    after = replica.weights(), replica.state()
    assert all((before[0][name] == after[0][name]).all() for name in after[0])
    assert all((a[3] == b[3]).all() for a, b in zip(before[1], after[1], strict=True))
    return replica.optimizer.num_updates


def test_a_gradient_that_is_not_finite_stops_every_rank_before_anything_is_changed():
    assert run_ranks(2, _not_finite) == [2, 2]


def _move(rank, store, layout, state, steps, dtype):
    """Take over ``state`` (global tensors by piece name; None starts afresh) and go on for ``steps``."""
    replica = Replica(rank, store, layout, settings(), tied=True, dtype=dtype)
    if state is not None:
        for piece in replica.optimizer.pieces():
            piece.data.copy_(state[piece.name][piece.box.slices])
        replica.optimizer.after_load(3)
    taken = replica.weights(), replica.state()
    replica.run(steps, start=0 if state is None else 3)
    return taken, replica.state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_state_moves_to_another_layout_and_back_and_training_goes_on(dtype):
    here, there = Layout(dp=2), Layout(pp=2, dp=2)

    def moved(layout, state, steps):
        ranks = run_ranks(layout.world_size, _move, layout, state, steps, dtype)
        for (weights, _), _ in ranks:
            for name, values in weights.items():
                if state is not None:
                    rounded = state[f"weight/{name}"].to(dtype).float()
                    assert torch.equal(torch.from_numpy(values), rounded), name
        return whole_state([pieces for (_, pieces), _ in ranks]), whole_state([pieces for _, pieces in ranks])

    _, three = moved(here, None, 3)
    _, six = moved(here, None, 6)
    assert {tensor.dtype for tensor in three.values()} == {torch.float32}
    away, after = moved(there, three, 3)
    back, again = moved(here, away, 3)
    for name, tensor in three.items():
        assert torch.equal(tensor, away[name]) and torch.equal(tensor, back[name]), name
        assert torch.equal(again[name], six[name]), name
        if dtype == torch.float32:
            torch.testing.assert_close(after[name], six[name], rtol=1e-6, atol=1e-7)


def _padding(rank, store):
    """Rows that no segment covers stay zero, with weight decay and gradients of everything else."""
    groups = groups_of(Layout(dp=2), rank, store)
    segment = Segment("vocabulary", (5, 4), (0, 0), (5, 4), 0, "normal")
    vocabulary = attach(nn.Parameter(torch.ones(8, 4)), ParameterSpec((8, 4), (segment,)))
    buckets = ParameterBuckets([vocabulary], groups, bucket_size_mb=1.0)
    optimizer = DistributedOptimizer(buckets, groups, settings())
    for _ in range(3):
        vocabulary.grad[:5] = 1.0
        buckets.finish()
        optimizer.step(1e-2)
    assert not vocabulary[5:].any()
    assert (vocabulary[:5] < 1).all()
    return sum(p.data.numel() for p in optimizer.pieces() if p.name == "weight/vocabulary")


def test_padding_rows_stay_zero_and_are_in_no_piece():
    assert sum(run_ranks(2, _padding)) == 5 * 4
