"""Pipeline schedules as data: what one stage does in a step, in order. Pure functions, no process needed.

A schedule says nothing of communication. The executor derives it: a forward needs the previous stage's activations, a
backward the next stage's gradients, and what an action produces is sent at once without waiting for the receiver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """One piece of work of a stage: the forward (F) or backward (B) pass of one micro-batch.

    ``microbatch`` counts the replica's own micro-batches from 0. ``chunk`` is the model chunk of an interleaved
    schedule; it is 0 where a stage is one piece.
    """

    kind: Literal["F", "B"]
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """The 1F1B schedule (PipeDream-Flush, Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1) of one stage.

    After ``num_stages - 1 - stage`` forwards to warm up, forwards and backwards alternate, so a stage never holds the
    activations of more than ``num_stages - stage`` micro-batches. Fewer micro-batches than stages merely shorten the
    warm-up. Raises ValueError when there is nothing to run or no such stage.
    """
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage {stage} is outside a pipeline of {num_stages} stages")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches {num_microbatches}: a pipeline needs at least one")
    warmup = min(num_stages - 1 - stage, num_microbatches)
    actions = [Action("F", microbatch) for microbatch in range(warmup)]
    for microbatch in range(warmup, num_microbatches):
        actions += [Action("F", microbatch), Action("B", microbatch - warmup)]
    actions += [Action("B", microbatch) for microbatch in range(num_microbatches - warmup, num_microbatches)]
    return actions
