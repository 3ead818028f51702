"""A tiny pipeline-parallel language model of plain torch operations, to test the engine's rooms without its model.

Embedding, layers ``x + tanh(x @ weight.T + bias)``, head; tied or not. Weights are functions of their global names, so
any split into stages starts with the same model.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from engine.parameters import ParameterSpec, Segment, attach, global_init, spec_of
from engine.planning.config import TrainConfig
from tests.weights import fill

HIDDEN, VOCAB, SEQ, BATCH, LAYERS = 8, 11, 5, 2, 3
ACTIVATION = (SEQ, BATCH, HIDDEN)


def parameter(name, shape, dtype=torch.float32, **flags):
    """One whole global tensor as a parameter, filled by its name."""
    segment = Segment(name, shape, (0,) * len(shape), shape, 0, "normal")
    spec = ParameterSpec(shape, (segment,), decay=len(shape) > 1, **flags)
    made = attach(nn.Parameter(torch.empty(shape, dtype=dtype)), spec)
    fill(made, spec, lambda s: global_init(s, seed=7, std=0.3, scaled_std=0.3))
    return made


class ToyStage(nn.Module):
    """One stage of the toy; with ``unused`` it also has a parameter that no forward pass touches."""

    def __init__(self, stage, layout, *, tied=False, dtype=torch.float32, unused=False):
        super().__init__()
        first, last = stage == 0, stage == layout.pp - 1
        self.embedding = parameter("embedding", (VOCAB, HIDDEN), dtype, shared_embedding=tied) if first else None
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        layers = layout.layers_of_stage(stage, LAYERS)
        for number in layers:
            self.weights.append(parameter(f"layers.{number}.weight", (HIDDEN, HIDDEN), dtype))
            self.biases.append(parameter(f"layers.{number}.bias", (HIDDEN,), dtype))
        self.unused = parameter(f"unused.{stage}", (3, 5), dtype) if unused else None
        self.head = None
        if last and not tied:
            self.head = parameter("head", (VOCAB, HIDDEN), dtype)
        elif last:
            self.head = self.embedding
            if not first:
                self.head = parameter("embedding", (VOCAB, HIDDEN), dtype, shared_embedding=True, owned=False)

    def in_order(self):
        """Parameters in the order in which forward uses them."""
        layers = [p for pair in zip(self.weights, self.biases, strict=True) for p in pair]
        ordered = [self.embedding, *layers, self.unused, self.head]
        return list(dict.fromkeys(p for p in ordered if p is not None))

    def forward(self, inputs, targets, microbatch=0):
        x = inputs if self.embedding is None else F.embedding(inputs.t(), self.embedding)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + torch.tanh(F.linear(x, weight, bias))
        if self.head is None:
            return x
        logits = F.linear(x, self.head).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.t().flatten(), reduction="sum")


def micro_batch(step, number):
    """Tokens and targets of micro-batch ``number`` of the global batch of ``step``."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    text = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def settings(**changes):
    """Training settings of the toy."""
    return TrainConfig(
        **{"sequence_length": SEQ, "global_batch_size": 8, "train_steps": 20, "lr": 1e-2, "clip_grad": 0.5, **changes}
    )


def name_of(parameter):
    """Global name of a parameter that is one whole tensor."""
    return spec_of(parameter).segments[0].name
