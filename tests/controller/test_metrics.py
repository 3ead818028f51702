"""What Prometheus scrapes of saves that failed."""

from __future__ import annotations

from types import SimpleNamespace

from controller.metrics import Metrics
from controller.view import ClusterView, Job
from everstep.protocol.messages import Event, JobState, JobStatus
from tests.controller.specs import spec


def test_failed_saves_are_counted_per_job() -> None:
    events = {str(n): Event(at=n, kind=kind, job="j", message="") for n, kind in enumerate(["save_failed", "x"] * 2)}

    def job(name: str, state: JobState) -> Job:
        status = JobStatus(job=name, name=name, state=state, submitted_at=0, changed_at=0)
        return Job(name, spec=spec(), status=status, events=events)

    running, ended = job("j", JobState.RUNNING), job("k", JobState.SUCCEEDED)
    board = SimpleNamespace(view=ClusterView(jobs={"j": running, "k": ended}))
    text = Metrics(board).text().decode()
    assert 'everstep_checkpoint_failures_total{job="j"} 2.0' in text
    assert 'everstep_checkpoint_failures_total{job="k"}' not in text
