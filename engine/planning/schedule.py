"""The learning rate as a function of the step alone, so that a resumed run cannot be out of step."""

from __future__ import annotations

import math

from engine.planning.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Rate of the update that follows ``step`` completed steps: linear warm-up to ``lr``, then cosine to ``min_lr``.

    The first of ``warmup_steps`` warm-up steps has lr / warmup_steps, the last has lr. The cosine ends after
    ``decay_steps`` steps (``train_steps`` when not given); from there on the rate is ``min_lr``.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    end = train.decay_steps or train.train_steps
    if step >= end:
        return train.min_lr
    progress = (step - train.warmup_steps) / (end - train.warmup_steps)
    return train.min_lr + (train.lr - train.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
