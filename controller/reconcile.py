"""One look at one job: what is to be written now, and when to look again if nothing changes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from controller import decide
from controller.decide import Decision, Policy
from controller.detect import Incident, Suspicion, detect
from controller.recovery import evidence, first_step_done_at, known_incident, recovered_data
from controller.view import ClusterView, Job
from engine.planning.messages import GenerationStart, Meeting
from everstep.protocol.messages import Event, JobState, JobStatus, Plan


@dataclass(frozen=True)
class Action:
    """What to write in one transaction (``status`` None: nothing), and when to look again without any change.

    ``look_at_disk``: nothing can be said before ``Job.on_disk`` is known; ask again with it.
    """

    status: JobStatus | None = None
    plan: Plan | None = None
    events: tuple[Event, ...] = ()
    look_again_at: float | None = None
    look_at_disk: bool = False


def reconcile(view: ClusterView, job: Job, now: float, policy: Policy) -> Action:
    """The next move of ``job``. Whatever ends a job goes before faults, faults go before improvements."""
    if not job.active:
        return Action()
    assert job.status is not None
    if decide.run_is_over(view, job, now, policy):
        return _end(view, job, JobState.SUCCEEDED, "the run is complete", now)
    if job.status.cancel_requested:
        return _cancel(view, job, now, policy)
    if job.plan is None:
        return _carry_out(view, job, decide.first_placement(view, job), now)
    if _waits_after_incident(job):
        return _carry_out(view, job, decide.resume(view, job, now, policy), now)
    if any(seen.value.run_complete for seen in job.outcomes_now().values()):
        return Action(look_again_at=now + 1.0)  # complete and saved; the last ranks are ending
    if job.status.drain_for:
        decision = decide.after_drain(view, job, now, policy)
        if decision.kind != "none":
            return _carry_out(view, job, decision, now)
    finding = detect(view, job, now, policy.patience)
    if isinstance(finding, Incident):
        return _answer(view, job, finding, now, policy)
    look_again_at = finding.until if isinstance(finding, Suspicion) else None
    if job.status.state in (JobState.STARTING, JobState.RECOVERING) and first_step_done_at(view, job) is not None:
        return _running(view, job, now)
    if job.status.state is JobState.RUNNING and not job.status.drain_for and finding is None:
        growth = decide.growth(view, job, now, policy)
        if growth.kind == "drain":
            return _drain(view, job, growth, now)
        look_again_at = growth.until
    return Action(look_again_at=look_again_at)


def _waits_after_incident(job: Job) -> bool:
    """Whether the incident of the present generation is known and its successor could not be planned yet."""
    assert job.status is not None and job.plan is not None
    incident = job.status.incident
    return incident is not None and incident["generation"] == job.plan.generation and not job.status.drain_for


def _answer(view: ClusterView, job: Job, incident: Incident, now: float, policy: Policy) -> Action:
    """A new incident: count it, say what is done about it, do it."""
    assert job.status is not None and job.plan is not None
    decision = decide.decide(view, job, incident, now, policy)
    if decision.kind == "look":
        return Action(look_at_disk=True)
    figures: dict[str, Any] = {
        "kind": incident.kind,
        "at": incident.at,
        "seen_at": incident.seen_at,
        "message": incident.message,
        "nodes": list(incident.nodes),
        "ranks": list(incident.ranks),
        "not_before": decision.until if decision.kind == "wait" else None,
    }
    told = Event(
        at=now,
        kind="incident",
        job=job.id,
        generation=incident.generation,
        message=f"{incident.kind.replace('_', ' ')}: {incident.message}",
        data={
            **figures,
            "step": view.step_of(job),
            "evidence": evidence(job, incident.ranks),
            "decision": decision.kind,
            "options": decision.options_data(),
        },
    )
    if decision.kind == "fail":
        return _end(view, job, JobState.FAILED, decision.reason, now, told)
    bad = dict.fromkeys((*job.status.bad_checkpoints, *([incident.checkpoint] if incident.checkpoint else [])))
    status = job.status.model_copy(
        update={
            "state": JobState.RECOVERING,
            "changed_at": now,
            "restarts": job.status.restarts + 1,
            "drain_for": "",
            "incident": known_incident(view, job, **figures),
            "bad_checkpoints": tuple(bad),
            "reason": decision.reason,
        }
    )
    if decision.kind == "replan":
        return _next_generation(job, status, decision, now, told)
    assert decision.kind == "wait"
    plan = job.plan.model_copy(update={"stop": "kill"})
    return Action(status, plan, (told, _event(job, now, "waiting", decision.reason)), decision.until)


def _carry_out(view: ClusterView, job: Job, decision: Decision, now: float) -> Action:
    """A decision that answers no new incident."""
    assert job.status is not None
    if decision.kind == "look":
        return Action(look_at_disk=True)
    if decision.kind == "replan":
        return _next_generation(job, job.status, decision, now)
    if decision.kind == "wait" and decision.reason != job.status.reason and not job.status.drain_for:
        status = job.status.model_copy(update={"reason": decision.reason})
        return Action(status, None, (_event(job, now, "waiting", decision.reason),), decision.until)
    return Action(look_again_at=decision.until)


def _next_generation(job: Job, status: JobStatus, decision: Decision, now: float, *told: Event) -> Action:
    assert decision.layout is not None and job.spec is not None
    generation = status.generation + 1
    start_step = decision.restore.step if decision.restore else 0
    run = job.spec.run_config()
    run_directory = f"{run.checkpoint.directory}/{job.id}"
    checkpoint = run.checkpoint.model_copy(update={"directory": f"{run_directory}/checkpoints"})
    first = decision.placements[0]
    plan = Plan(
        job=job.id,
        generation=generation,
        layout=decision.layout,
        placements=decision.placements,
        meeting=Meeting(host=first.host, port=decision.meeting_port, prefix=f"{job.id}/g{generation}"),
        restore=decision.restore,
        history=(
            *(job.plan.history if job.plan else ()),
            GenerationStart(generation=generation, start_step=start_step),
        ),
        run=run.model_copy(update={"checkpoint": checkpoint}),
        run_directory=run_directory,
        reason=decision.reason,
        created_at=now,
    )
    state = JobState.RECOVERING if status.state is JobState.RECOVERING else JobState.STARTING
    update: dict[str, Any] = {
        "state": state,
        "generation": generation,
        "reason": decision.reason,
        "drain_for": "",
        "started_at": status.started_at or now,
        "changed_at": now if state is not status.state else status.changed_at,
    }
    planned = Event(
        at=now,
        kind="planned",
        job=job.id,
        generation=generation,
        message=f"generation {generation}: {decision.reason}",
        data={
            "layout": str(decision.layout),
            "start_step": start_step,
            "nodes": {placement.node: list(placement.ranks) for placement in decision.placements},
            "options": decision.options_data(),
        },
    )
    return Action(status.model_copy(update=update), plan, (*told, planned))


def _running(view: ClusterView, job: Job, now: float) -> Action:
    """The first step of a generation is done."""
    assert job.status is not None and job.plan is not None
    update = {"state": JobState.RUNNING, "changed_at": now, "incident": None, "reason": job.plan.reason}
    status = job.status.model_copy(update=update)
    event = _event(job, now, "running", f"running as {job.plan.layout}")
    if job.status.incident is not None:
        data = recovered_data(view, job)
        lost = f"{data['steps_lost']} step{'s' * (data['steps_lost'] != 1)} lost"
        message = f"recovered from {data['kind'].replace('_', ' ')} in {data['seconds']:.2f} s, {lost}"
        if data["kind"] == "grow":
            message = f"grown to {data['new_layout']}, a pause of {data['seconds']:.2f} s, {lost}"
        message = f"{message}: {data['old_layout']} to {data['new_layout']}" if data["kind"] != "grow" else message
        event = _event(job, now, "recovered", message, data)
    return Action(status, None, (event,))


def _drain(view: ClusterView, job: Job, decision: Decision, now: float) -> Action:
    assert job.status is not None and job.plan is not None
    incident = known_incident(view, job, kind="grow", at=now, seen_at=now, message=decision.reason)
    status = job.status.model_copy(update={"drain_for": "grow", "incident": incident, "reason": decision.reason})
    plan = job.plan.model_copy(update={"stop": "save"})
    event = _event(job, now, "draining", decision.reason, {"options": decision.options_data()})
    return Action(status, plan, (event,))


def _cancel(view: ClusterView, job: Job, now: float, policy: Policy) -> Action:
    if decide.everybody_gone(view, job, now, policy):
        return _end(view, job, JobState.CANCELLED, "cancelled on request", now)
    assert job.status is not None and job.plan is not None
    if job.plan.stop == "kill":
        return Action(look_again_at=now + 1.0)
    plan = job.plan.model_copy(update={"stop": "kill"})
    event = _event(job, now, "cancelling", "ending the ranks")
    return Action(job.status.model_copy(update={"reason": "cancelling", "drain_for": ""}), plan, (event,))


def _end(view: ClusterView, job: Job, state: JobState, reason: str, now: float, *told: Event) -> Action:
    assert job.status is not None
    update = {
        "state": state,
        "reason": reason,
        "ended_at": now,
        "changed_at": now,
        "drain_for": "",
        "incident": None,
    }
    plan = None
    if job.plan is not None and state is JobState.FAILED:
        plan = job.plan.model_copy(update={"stop": "kill"})
    event = _event(job, now, state.value.lower(), reason, {"step": view.step_of(job)})
    return Action(job.status.model_copy(update=update), plan, (*told, event))


def _event(job: Job, now: float, kind: str, message: str, data: dict[str, Any] | None = None) -> Event:
    assert job.status is not None
    return Event(at=now, kind=kind, job=job.id, generation=job.status.generation, message=message, data=data or {})
