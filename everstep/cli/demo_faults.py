"""When the demo kills the node and when it starts it again: a small state machine over what the service tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from everstep.client import JobDetail
from everstep.protocol.messages import JobState

Move = Literal["kill", "restart"]


@dataclass(frozen=True)
class FaultPlan:
    """Kill at ``kill_step`` completed steps; start again when the next generation has come ``run_on`` steps further."""

    kill_step: int
    run_on: int

    @classmethod
    def for_steps(cls, steps: int) -> FaultPlan:
        """Kill after 35 % of the run, start again after another 12 %. Odd steps, away from the saves."""
        return cls(kill_step=max(1, steps * 35 // 100 // 10 * 10 + 4), run_on=max(3, steps * 12 // 100))


class FaultScript:
    """Says once when to kill, and once when to start again."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._killed_in: int | None = None
        self._started = False

    def move(self, job: JobDetail) -> Move | None:
        """What to do now, if anything."""
        if job.state is not JobState.RUNNING:
            return None
        if self._killed_in is None:
            if job.step < self._plan.kill_step:
                return None
            self._killed_in = job.generation
            return "kill"
        start = job.plan.start_step if job.plan is not None else 0
        if self._started or job.generation == self._killed_in or job.step < start + self._plan.run_on:
            return None
        self._started = True
        return "restart"
