"""The story of one recovery, once its first step is done: where the seconds went and how many steps were lost."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from controller.detect.faults import rank_faults, shortened
from controller.view import ClusterView, Job

MOST_EVIDENCE = 16
START_PHASES = ("start", "meet", "build", "restore", "first_step")


def known_incident(view: ClusterView, job: Job, **figures: Any) -> dict[str, Any]:
    """What ``status.incident`` keeps until the job steps again; survives a restart of the controller."""
    assert job.plan is not None and job.status is not None
    before = job.status.incident or {}
    if before.get("kind") == "grow":
        before = {}  # training went on while it drained
    return {
        "generation": job.plan.generation,
        "old_layout": str(job.plan.layout),
        "known_step": max(view.step_of(job), int(before.get("known_step", 0))),
        "down_since": before.get("down_since", figures["at"]),
        **figures,
    }


def evidence(job: Job, ranks: Collection[int]) -> list[dict[str, Any]]:
    """What is known of how ``ranks`` of the current generation ended: cause, exit code or signal, last log lines.

    The first ``MOST_EVIDENCE`` in order of time: an event has to fit into etcd.
    """
    faults = [fault for fault in rank_faults(job.outcomes_now()) if fault.exit.rank in ranks]
    return [
        {
            "rank": fault.exit.rank,
            "node": fault.node,
            "step": fault.exit.step,
            "cause": shortened(fault.exit.cause),
            "exit_code": fault.exit.exit_code,
            "signal": fault.exit.signal,
            "log_tail": fault.exit.log_tail,
        }
        for fault in faults[:MOST_EVIDENCE]
    ]


def first_step_done_at(view: ClusterView, job: Job) -> float | None:
    """When the current generation completed its first step; None when it has not yet.

    A rank that is some steps further when it is heard has its later steps subtracted.
    """
    assert job.plan is not None
    start = job.plan.restore.step if job.plan.restore else 0
    done = [
        rank.since - (rank.step - start - 1) * (rank.step_s or 0.0) for rank in view.ranks_of(job) if rank.step > start
    ]
    return min(done, default=None)


def recovered_data(view: ClusterView, job: Job) -> dict[str, Any]:
    """Figures of the event "recovered": kind, seconds in all and by phase, steps lost, old and new layout.

    ``faults`` names every rank of the old generation that ended by a fault of its own; the decision was made at the
    first, others may have been heard of since. ``stop`` is the time agents took to end the old ranks; start-up phases
    are those of the rank that took longest in all; ``other`` is what no phase accounts for (messages on their way,
    waiting for devices). Agents' clocks are taken as they are.
    """
    assert job.plan is not None and job.status is not None and job.status.incident is not None
    incident = job.status.incident
    done_at = first_step_done_at(view, job)
    assert done_at is not None
    start = job.plan.restore.step if job.plan.restore else 0
    old_generation = int(incident["generation"])
    old = [seen.value for seen in job.outcomes.get(old_generation, {}).values()]
    at = float(incident["at"])
    split: dict[str, float] = {}
    if incident["kind"] == "grow":
        # Training went on until the ranks were asked to stop: the pause begins there.
        at = min([outcome.stop_began_at for outcome in old if outcome.stop_began_at is not None], default=at)
    else:
        split["detect"] = max(0.0, float(incident["seen_at"]) - at)
        split["decide"] = max(0.0, job.plan.created_at - float(incident["seen_at"]))
    stops = [
        outcome.stop_ended_at - outcome.stop_began_at
        for outcome in old
        if outcome.stop_began_at is not None and outcome.stop_ended_at is not None
    ]
    split["stop"] = max(stops, default=0.0)
    if incident["kind"] == "grow":
        ended = [outcome.stop_ended_at for outcome in old if outcome.stop_ended_at is not None]
        split["decide"] = max(0.0, job.plan.created_at - max(ended, default=job.plan.created_at))
    timings = [{phase: rank.timings.get(phase, 0.0) for phase in START_PHASES} for rank in view.ranks_of(job)]
    slowest: dict[str, float] = max(timings, key=lambda one: sum(one.values()))
    split |= slowest
    seconds = max(0.0, done_at - at)
    split["other"] = max(0.0, seconds - sum(split.values()))
    faults = rank_faults(job.outcomes.get(old_generation, {}))
    known_step = max(int(incident["known_step"]), view.progress(job, old_generation))
    return {
        "kind": incident["kind"],
        "seconds": round(seconds, 6),
        "split": {phase: round(value, 6) for phase, value in split.items()},
        "steps_lost": max(0, known_step - start),
        "at": at,
        "down_since": incident["down_since"],
        "first_step_at": done_at,
        "restored_step": start,
        "old_generation": old_generation,
        "generation": job.plan.generation,
        "old_layout": incident["old_layout"],
        "new_layout": str(job.plan.layout),
        "message": incident["message"],
        "faults": [fault.describe() for fault in faults if not fault.is_echo],
    }
