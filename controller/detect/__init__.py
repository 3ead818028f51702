"""Pure functions from what is known, and the time, to incidents; one file a kind of fault."""

from __future__ import annotations

from controller.detect.damaged_checkpoint import damaged_checkpoint
from controller.detect.dead_node import dead_node
from controller.detect.dead_rank import dead_rank
from controller.detect.incident import Finding, Incident, Suspicion
from controller.detect.patience import Patience
from controller.detect.user_error import user_error
from controller.view import ClusterView, Job

DETECTORS = (user_error, dead_node, damaged_checkpoint, dead_rank)
"""In order of precedence: a dead node explains its ranks' ends and the failed collectives of others."""


def detect(view: ClusterView, job: Job, now: float, patience: Patience) -> Incident | Suspicion | None:
    """The incident of the job's current generation that explains most, else the suspicion to look at first."""
    findings: list[Finding] = []
    for detector in DETECTORS:
        findings += detector(view, job, now, patience)
    for finding in findings:
        if isinstance(finding, Incident):
            return finding
    suspicions = [finding for finding in findings if isinstance(finding, Suspicion)]
    return min(suspicions, key=lambda suspicion: suspicion.until, default=None)


__all__ = ["Finding", "Incident", "Patience", "Suspicion", "detect"]
