"""What to do about an incident, a waiting job, or a device that became free. Pure: the time is an argument.

Each function weighs the ways out that are legal and says in words why it took one. Costs are predicted step times
(``engine/planning/step_time.py``); steps lost are those between the known progress and the checkpoint restored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from controller.detect import Incident, Patience
from controller.detect.dead_node import Death, death_of
from controller.restore import newest_restore_point
from controller.scheduler import blocked_by, choose_layout, could_ever_fit, free_nodes, hardware_of, place, queue
from controller.view import ClusterView, Job
from engine.planning.layout import Layout
from engine.planning.messages import RestorePoint
from engine.planning.search import RankedLayout
from engine.planning.step_time import step_time_s
from everstep.protocol.messages import Placement


@dataclass(frozen=True)
class Policy:
    """The settings of decisions, in seconds and shares."""

    settle_s: float = 5.0
    min_gain: float = 0.05
    growth_pause_s: float = 2.0
    back_off_s: float = 1.0
    back_off_most_s: float = 30.0
    index_wait_s: float = 2.0
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True)
class Decision:
    """What to do, and why.

    replan: a new generation with ``layout``, ``placements``, ``restore``, meeting at ``meeting_port`` of the node of
    rank 0; wait: until something changes, at the
    latest ``until``; drain: ask the running generation to save and end, because more devices are free; fail: for good;
    look: at the disk first, which checkpoints there are (``Job.on_disk``); none: go on as it is.
    """

    kind: Literal["replan", "wait", "drain", "fail", "look", "none"]
    reason: str
    layout: Layout | None = None
    placements: tuple[Placement, ...] = ()
    meeting_port: int = 0
    restore: RestorePoint | None = None
    options: tuple[RankedLayout, ...] = ()
    until: float | None = None

    def options_data(self) -> list[dict[str, Any]]:
        """The options for an event: layout, predicted seconds a step, spares."""
        return [
            {"layout": str(option.layout), "step_s": round(option.step_s, 6), "spares": option.spares}
            for option in self.options
        ]


NOTHING = Decision("none", "")
LOOK = Decision("look", "")


def decide(view: ClusterView, job: Job, incident: Incident, now: float, policy: Policy) -> Decision:
    """What to do about a new incident."""
    assert job.status is not None and job.spec is not None
    if incident.kind == "user_error":
        return Decision("fail", incident.message)
    budget = job.spec.resources.max_restarts
    if job.status.restarts + 1 > budget:
        return Decision("fail", f"{incident.message}; the budget of {budget} restarts is used up")
    if incident.kind == "dead_rank" and (delay := back_off_s(view, job, policy)) > 0:
        return Decision("wait", f"the same step failed before: next try in {delay:.3g} s", until=now + delay)
    return recover(view, job, policy, extra_bad=(incident.checkpoint,) if incident.checkpoint else ())


def back_off_s(view: ClusterView, job: Job, policy: Policy) -> float:
    """Nothing for the first death of a rank at a step; then ``back_off_s``, doubled for each further one there.

    Deaths of nodes have nothing to do with the step, so they neither wait nor count.
    """
    step = view.step_of(job)
    repeats = 0
    for key in sorted(job.events, reverse=True):
        event = job.events[key]
        if event.kind != "incident":
            continue
        if event.data.get("kind") != "dead_rank" or event.data.get("step") != step:
            break
        repeats += 1
    if repeats == 0:
        return 0.0
    return float(min(policy.back_off_s * 2 ** (repeats - 1), policy.back_off_most_s))


def recover(view: ClusterView, job: Job, policy: Policy, *, extra_bad: tuple[str, ...] = ()) -> Decision:
    """A new generation on what is left, from the newest checkpoint that counts, or wait for devices."""
    assert job.plan is not None and job.status is not None
    return _replan(view, job, keep=job.plan.layout, bad={*job.status.bad_checkpoints, *extra_bad})


def _replan(view: ClusterView, job: Job, *, keep: Layout | None, bad: set[str]) -> Decision:
    assert job.spec is not None
    free = free_nodes(view, job)
    choice = choose_layout(job, free, keep=keep, fixed_only=job.plan is None)
    if choice is None:
        return Decision("wait", _too_few(job, sum(len(node.devices) for node in free), len(view.nodes)))
    if job.plan is not None and job.on_disk is None:
        return LOOK
    restore = newest_restore_point(job, bad)
    placements = place(choice.best.layout, free)
    start = f"from the checkpoint of step {restore.step}" if restore else "from the seed"
    return Decision(
        "replan",
        f"{choice.best.layout} {start}: {choice.why}{choice.idle}",
        layout=choice.best.layout,
        placements=placements,
        meeting_port=view.nodes[placements[0].node].meeting_port,
        restore=restore,
        options=choice.considered,
    )


def _too_few(job: Job, free: int, num_nodes: int) -> str:
    assert job.spec is not None
    there = f"{free} healthy device{'s are' if free != 1 else ' is'} free on {num_nodes} node{'s' * (num_nodes != 1)}"
    if isinstance(job.spec.layout, Layout) and job.plan is None:
        return f"waiting for devices: layout {job.spec.layout} needs {job.spec.layout.world_size} ranks, {there}"
    return f"waiting for devices: no legal layout with at least {job.spec.resources.min_ranks} ranks, {there}"


def first_placement(view: ClusterView, job: Job) -> Decision:
    """Place a queued job, first come first; jobs that the cluster could never hold block nobody."""
    earlier = blocked_by(view, job)
    if earlier is not None:
        return Decision("wait", f"waiting in the queue behind {earlier.id}")
    return _replan(view, job, keep=None, bad=set())


def growth(view: ClusterView, job: Job, now: float, policy: Policy) -> Decision:
    """Whether to bring a running job to a better layout that free devices now allow.

    A layout that the user fixed and that fits again is always taken back; else the predicted step must be shorter by
    ``min_gain``. Nothing moves within ``settle_s`` of the last change, nor for a run that is about to end, nor while
    another job waits for devices.
    """
    assert job.plan is not None and job.spec is not None and job.status is not None
    free = free_nodes(view, job)
    choice = choose_layout(job, free, keep=job.plan.layout)
    if choice is None or choice.best.layout == job.plan.layout:
        return NOTHING
    if isinstance(job.spec.layout, Layout) and job.plan.layout == job.spec.layout:
        return NOTHING
    present = {(placement.node, device) for placement in job.plan.placements for device in placement.devices}
    if present >= {(p.node, device) for p in place(choice.best.layout, free) for device in p.devices}:
        return NOTHING  # nothing is free that would help
    better, run = choice.best, job.spec.run_config()
    present_s = step_time_s(run, job.plan.layout, hardware_of(free), tp_in_node=_tp_in_node(job))
    wanted = better.layout == job.spec.layout
    if not wanted and better.step_s > present_s * (1 - policy.min_gain):
        return NOTHING
    if any(could_ever_fit(view, waiting) for waiting in queue(view)):
        return NOTHING
    since = max(job.plan.created_at, job.status.changed_at)
    if now < since + policy.settle_s:
        return Decision("wait", "settling after the last change", until=since + policy.settle_s)
    step_s = max((rank.step_s or 0.0 for rank in view.ranks_of(job)), default=0.0)
    remaining_s = (job.spec.train.train_steps - view.step_of(job)) * (step_s or present_s)
    if remaining_s < policy.growth_pause_s:
        return NOTHING
    gain = f"the layout that the job asks for fits again, {better.layout}" if wanted else f"{better.layout} is faster"
    why = choice.idle if wanted else f"; {choice.why}{choice.idle}"
    return Decision(
        "drain",
        f"{gain}: predicted {better.step_s:.3g} s a step, {present_s:.3g} s in {job.plan.layout}{why}",
        layout=better.layout,
        options=choice.considered,
    )


def _tp_in_node(job: Job) -> bool:
    assert job.plan is not None
    tp = job.plan.layout.tp
    return tp == 1 or all(len(placement.ranks) % tp == 0 for placement in job.plan.placements)


def after_drain(view: ClusterView, job: Job, now: float, policy: Policy) -> Decision:
    """The next generation once a drained one has ended well and what it saved is known."""
    assert job.plan is not None and job.status is not None
    outcomes = job.outcomes_now()
    placed = job.plan.placements
    if len(outcomes) < len(placed) or not all(seen.value.all_gone for seen in outcomes.values()):
        return NOTHING
    ends = [end for seen in outcomes.values() for end in seen.value.exits]
    if any(end.is_fault for end in ends):
        return NOTHING
    if job.on_disk is None:
        return LOOK
    step = max((end.step for end in ends), default=0)
    restore = newest_restore_point(job, job.status.bad_checkpoints)
    if restore is None or restore.step < step:
        until = max(seen.at for seen in outcomes.values()) + policy.index_wait_s
        if now < until:
            return Decision("wait", f"waiting for the checkpoint of step {step} to be seen", until=until)
    return recover(view, job, policy)


def resume(view: ClusterView, job: Job, now: float, policy: Policy) -> Decision:
    """Try again to recover a job that had to wait after its incident."""
    assert job.status is not None and job.status.incident is not None
    not_before = float(job.status.incident.get("not_before") or 0.0)
    if now < not_before:
        return Decision("wait", job.status.reason, until=not_before)
    return recover(view, job, policy)


def run_is_over(view: ClusterView, job: Job, now: float, policy: Policy) -> bool:
    """Whether the run is complete and none of its ranks is left."""
    if not any(seen.value.run_complete for seen in job.outcomes_now().values()):
        return False
    return everybody_gone(view, job, now, policy)


def everybody_gone(view: ClusterView, job: Job, now: float, policy: Policy) -> bool:
    """Whether each node of the current generation has proven that nothing is left of it, or is dead itself."""
    if job.plan is None:
        return True
    outcomes = job.outcomes_now()
    for placement in job.plan.placements:
        outcome = outcomes.get(placement.node)
        if outcome is not None and outcome.value.all_gone:
            continue
        if not isinstance(death_of(view, placement, now, policy.patience), Death):
            return False
    return True
