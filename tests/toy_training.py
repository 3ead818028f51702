"""Train the toy in any layout with the engine's optimizer, and put its state together."""

from __future__ import annotations

import torch

from engine.checkpoint.boxes import covers
from engine.data_parallel.buckets import ParameterBuckets
from engine.data_parallel.distributed_optimizer import DistributedOptimizer
from engine.pipeline.executor import run_step
from engine.pipeline.schedules import one_forward_one_backward
from tests.harness import groups_of
from tests.toy_stages import ACTIVATION, BATCH, SEQ, ToyStage, micro_batch, name_of

BUCKET_MB = 1e-3
MICRO_BATCHES = 5


class Replica:
    """One rank of a layout that trains the toy."""

    def __init__(self, rank, store, layout, train, *, frozen=(), **kwargs):
        self.groups = groups_of(layout, rank, store)
        self.train = train
        self.stage = ToyStage(self.groups.at.pp, layout, **kwargs)
        for parameter in self.stage.parameters():
            parameter.requires_grad_(name_of(parameter) not in frozen)
        self.dtype = self.stage.in_order()[0].dtype
        self.buckets = ParameterBuckets(self.stage.in_order(), self.groups, bucket_size_mb=BUCKET_MB)
        self.optimizer = DistributedOptimizer(self.buckets, self.groups, train)

    def backward(self, step, count=MICRO_BATCHES, *, loss_scale=1.0):
        layout, at = self.groups.layout, self.groups.at
        mine = layout.microbatches_of_replica(at.dp, count)
        result = run_step(
            self.stage,
            one_forward_one_backward(at.pp, layout.pp, len(mine)),
            self.groups,
            [micro_batch(step, number) for number in mine],
            activation_shape=ACTIVATION,
            dtype=self.dtype,
            device=torch.device("cpu"),
            loss_scale=loss_scale / (count * BATCH * SEQ),
            before_last_backward=self.buckets.arm,
        )
        self.buckets.finish()
        return result.loss_sum

    def run(self, steps, start=0):
        """Norms and loss sums of the steps."""
        out = []
        for step in range(start, start + steps):
            loss = self.backward(step)
            norm, extras = self.optimizer.step(self.train.lr, loss.view(1))
            out.append((norm, extras.item()))
        return out

    def weights(self):
        return {name_of(p): p.detach().float().numpy().copy() for p in self.stage.parameters()}

    def state(self):
        """(piece name, box, owned, values) of this rank."""
        return [(p.name, p.box, p.owned, p.data.numpy().copy()) for p in self.optimizer.pieces()]


def whole_state(ranks):
    """Every global tensor from the owned pieces of all ranks; each element exactly once."""
    tensors = {}
    for name, shape in _shapes(ranks).items():
        owned = [(box, values) for pieces in ranks for n, box, mine, values in pieces if n == name and mine]
        assert covers(shape, [box for box, _ in owned]), name
        whole = torch.full(shape, float("nan"))
        for box, values in owned:
            whole[box.slices] = torch.from_numpy(values)
        tensors[name] = whole
    return tensors


def _shapes(ranks):
    ends = {}
    for pieces in ranks:
        for name, box, _, _ in pieces:
            ends.setdefault(name, []).append(box.end)
    return {name: tuple(map(max, zip(*boxes, strict=True))) for name, boxes in ends.items()}
