"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740, section 3.2).

Gradients below 6e-8 vanish in fp16. The loss is multiplied by a scale before backward and the summed gradients are
divided by it. The scale is as large as it can be without an overflow: an update with a gradient that is not finite is
skipped and the scale shrinks, and after a number of good steps it grows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from engine.planning.config import LossScaleConfig


@dataclass(frozen=True)
class LossScaler:
    """The state of loss scaling, the same on every rank. ``good_steps``: since the scale last changed."""

    settings: LossScaleConfig
    scale: float
    good_steps: int = 0

    @classmethod
    def initial(cls, settings: LossScaleConfig) -> Self:
        """The state before the first step."""
        return cls(settings, settings.initial)

    def after(self, *, overflow: bool) -> Self:
        """The state after a step. Raises FloatingPointError when an overflow finds the smallest scale in use."""
        settings = self.settings
        if overflow:
            if self.scale <= settings.minimum:
                raise FloatingPointError(
                    f"the gradients overflow fp16 at the smallest loss scale, train.loss_scale.minimum {self.scale:g}"
                )
            return replace(self, scale=max(self.scale * settings.backoff_factor, settings.minimum), good_steps=0)
        if self.good_steps + 1 < settings.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=self.scale * settings.growth_factor, good_steps=0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it, as JSON."""
        state = asdict(self)
        del state["settings"]
        return state

    @classmethod
    def restored(cls, settings: LossScaleConfig, state: dict[str, Any]) -> Self:
        """Inverse of ``state``; the settings are those of the run that goes on."""
        return cls(settings, scale=float(state["scale"]), good_steps=int(state["good_steps"]))
