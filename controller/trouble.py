"""Jobs that this controller itself fails on: each is left alone for a while, and the others go on."""

from __future__ import annotations

from dataclasses import replace

from controller.reconcile import Action
from controller.view import Job
from everstep.protocol.messages import Event

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
LONGEST_TEXT = 500


class Trouble:
    """When each job in trouble is to be looked at again; the wait doubles while it goes on."""

    def __init__(self) -> None:
        self._delay_s: dict[str, float] = {}
        self._not_before: dict[str, float] = {}

    def not_before(self, job_id: str) -> float:
        """When to look at the job again; 0 when nothing is wrong."""
        return self._not_before.get(job_id, 0.0)

    def failed(self, job_id: str, now: float) -> float:
        """A look at the job failed; returns when to try again."""
        delay_s = self._delay_s.get(job_id, FIRST_DELAY_S)
        self._delay_s[job_id] = min(2 * delay_s, LONGEST_DELAY_S)
        self._not_before[job_id] = now + delay_s
        return now + delay_s

    def over(self, job_id: str) -> None:
        """A look at the job went well, or there is no such job any more."""
        self._delay_s.pop(job_id, None)
        self._not_before.pop(job_id, None)


def tell_failure(job: Job, error: Exception, now: float) -> Action:
    """Show it as the job's reason, with an event; nothing new to write when it is shown already."""
    assert job.status is not None
    trouble = f"{type(error).__name__}: {error}"[:LONGEST_TEXT]
    if job.status.trouble == trouble:
        return Action()
    reason = _reason(trouble)
    status = job.status.model_copy(update={"reason": reason, "trouble": trouble})
    event = Event(at=now, kind="controller_error", job=job.id, generation=status.generation, message=reason)
    return Action(status, events=(event,))


def tell_over(job: Job, action: Action, now: float) -> Action:
    """``action``, and when the job was in trouble, the end of that."""
    status = action.status or job.status
    assert status is not None
    if not status.trouble:
        return action
    reason = status.reason
    if reason == _reason(status.trouble):
        reason = job.plan.reason if job.plan is not None else ""
    message = "the controller can handle this job again"
    event = Event(at=now, kind="controller_error_over", job=job.id, generation=status.generation, message=message)
    over = status.model_copy(update={"reason": reason, "trouble": ""})
    return replace(action, status=over, events=(*action.events, event))


def _reason(trouble: str) -> str:
    return f"the controller failed on this job: {trouble}"
