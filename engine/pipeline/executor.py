"""Runs one stage's list of actions: the only loop over micro-batches there is, with one stage or with many.

Activations and their gradients [seq, batch, hidden] travel point to point between neighbouring stages. Sends are
started and left alone, receives block; with the lists of ``schedules.py`` that cannot deadlock, and nothing here looks
at other replicas, so their numbers of micro-batches may differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# A backward from a given gradient imports it (and sympy) at its first call: here it is there before ranks are forked.
import torch.fx.experimental.symbolic_shapes
from torch import Tensor

from engine.groups import Group, Groups, Pending
from engine.pipeline.schedules import Action

Batch = tuple[Tensor | None, Tensor | None]
"""Tokens and targets [batch, seq] of one micro-batch. The first stage needs tokens, the last one needs targets."""

_GRADIENT_SENDS_KEPT = 2
"""When a 1F1B stage sends the gradient of micro-batch m, that of m - 2 has been received: waiting for it is free."""


@dataclass(frozen=True)
class StepResult:
    """``loss_sum``: sum of token losses over the replica's micro-batches, float64 scalar; 0 but on the last stage."""

    loss_sum: Tensor


def run_step(
    stage: Callable[[Tensor, Tensor | None, int], Tensor],
    actions: Sequence[Action],
    groups: Groups,
    batches: Sequence[Batch] | Callable[[int], Batch],
    *,
    activation_shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    loss_scale: float,
    before_last_backward: Callable[[], None] | None = None,
) -> StepResult:
    """Run forward and backward of one step on this rank's stage, accumulating into the parameters' gradients.

    ``stage(inputs, targets, microbatch)`` takes tokens [batch, seq] on the first stage, else activations, and the
    replica's number of the micro-batch. It returns activations, or the summed token loss on the last stage, whose
    backward starts from that loss times ``loss_scale`` (one over the tokens of the global batch). ``activation_shape``
    is [seq, batch, hidden]. ``before_last_backward`` is called right before the backward pass that completes the
    gradients. Raises RuntimeError when a peer is gone.
    """
    batch_of = batches if callable(batches) else batches.__getitem__
    activations = _Link(groups.pp, towards=1)
    gradients = _Link(groups.pp_backward, towards=-1)
    held: dict[Action, tuple[Tensor, Tensor]] = {}
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    last_backward = max(place for place, action in enumerate(actions) if action.kind == "B")

    for place, action in enumerate(actions):
        if action.kind == "F":
            tokens, targets = batch_of(action.microbatch)
            if groups.is_first_stage:
                assert tokens is not None, "the first stage needs tokens"
                inputs = tokens
            else:
                inputs = activations.receive(torch.empty(activation_shape, dtype=dtype, device=device), action)
                inputs.requires_grad_()
            output = stage(inputs, targets if groups.is_last_stage else None, action.microbatch)
            if groups.is_last_stage:
                loss_sum += output.detach()
            else:
                activations.send(output.detach(), action)
            held[action] = (inputs, output)
        else:
            inputs, output = held.pop(Action("F", action.microbatch, action.chunk))
            if groups.is_last_stage:
                start: Tensor | None = None
                output = output * loss_scale
            else:
                start = gradients.receive(torch.empty(activation_shape, dtype=dtype, device=device), action)
                # The gradient is back, so the activation it answers has arrived long ago.
                activations.settle_oldest()
            if place == last_backward and before_last_backward is not None:
                before_last_backward()
            if output.requires_grad:  # not so on a first stage that is frozen as a whole
                torch.autograd.backward(output, start)
            if not groups.is_first_stage:
                assert inputs.grad is not None
                gradients.send(inputs.grad, action)
                gradients.settle_down_to(_GRADIENT_SENDS_KEPT)

    activations.settle_down_to(0)
    gradients.settle_down_to(0)
    return StepResult(loss_sum)


class _Link:
    """One direction of travel through the pipeline: what comes from one neighbour and goes to the other."""

    def __init__(self, group: Group, towards: int) -> None:
        self._group = group
        self._towards = towards
        self._sent: deque[tuple[Pending, Tensor]] = deque()  # a tensor must live until its send has completed

    def send(self, tensor: Tensor, action: Action) -> None:
        """Start sending; does not wait for the receiver."""
        tensor = tensor.contiguous()
        to = self._group.rank + self._towards
        self._sent.append((self._group.send(tensor, to, self._tag(action)), tensor))

    def receive(self, into: Tensor, action: Action) -> Tensor:
        """Wait for what the neighbour's ``action`` produced."""
        _settle(self._group.receive(into, self._group.rank - self._towards, self._tag(action)))
        return into

    def settle_oldest(self) -> None:
        """Wait for the oldest send that is still kept."""
        pending, _ = self._sent[0]
        _settle(pending)
        self._sent.popleft()

    def settle_down_to(self, kept: int) -> None:
        """Wait for the oldest sends until only ``kept`` are left."""
        while len(self._sent) > kept:
            self.settle_oldest()

    def _tag(self, action: Action) -> int:
        """Gloo matches messages by tag; both directions may share one group. NCCL goes by order alone."""
        return 2 * action.microbatch + (action.kind == "B")


def _settle(pending: Pending) -> None:
    """The one place where the pipeline blocks on a neighbour."""
    pending.wait()
