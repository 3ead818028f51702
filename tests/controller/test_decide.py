"""Situations and what is done about them: pure, so a table of situations is the test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller import decide
from controller.decide import Policy
from controller.detect import Incident
from controller.reconcile import reconcile
from controller.restore import newest_checkpoint
from controller.scheduler import free_nodes, place
from controller.view import Job, NodeVerdict, OnDisk
from engine.planning.layout import Layout
from engine.planning.messages import GenerationStart, RestorePoint
from everstep.protocol.link import Verdict
from everstep.protocol.messages import Event, JobState
from tests.controller.specs import checkpoint, exit_of, job, node, nodes_of, outcome, plan, rank_status, spec, view

FOUR = nodes_of("a b c d")
POLICY = Policy(settle_s=5.0)


def dead(kind: str = "dead_node", **more: Any) -> Incident:
    return Incident(kind=kind, job="j", generation=1, at=99.0, seen_at=99.1, message="it died", **more)  # type: ignore[arg-type]


def ranks_at(step: int, count: int, **more: Any) -> tuple[Any, ...]:
    return tuple(rank_status("j", 1, rank, step, **more) for rank in range(count))


def nodes_without(*names: str) -> dict[str, Any]:
    return {name: record for name, record in FOUR.items() if name not in names}


@pytest.mark.parametrize(
    ("had", "left", "becomes", "spares"),
    [
        (Layout(tp=2, pp=2, dp=2), nodes_without(), "TP2·PP2·DP2", 0),  # a rank died, its node did not
        (Layout(tp=2, pp=2, dp=2), nodes_without("b"), "TP2·PP1·DP3", 0),
        (Layout(tp=2, pp=2, dp=2), nodes_without("a", "d"), "TP1·PP1·DP4", 0),
        (Layout(tp=2, pp=2, dp=2), nodes_without("a", "b", "c"), "TP1·PP1·DP2", 0),
        (Layout(tp=2, pp=2, dp=2), {"a": node("a", devices=1)}, "TP1·PP1·DP1", 0),
        (Layout(tp=2, pp=2, dp=2), {"a": node("a"), "b": node("b"), "c": node("c", devices=1)}, "TP1·PP1·DP4", 1),
    ],
)
def test_what_is_left_gets_the_best_legal_layout(had: Layout, left: dict[str, Any], becomes: str, spares: int) -> None:
    fixed = spec(layout=had.model_dump(), model__hidden_size=192, model__ffn_hidden_size=768)
    one = job(fixed, of_plan=plan(had, FOUR), checkpoints=(checkpoint(10),))
    decision = decide.decide(view(left, one), one, dead(), 100.0, POLICY)
    assert decision.kind == "replan"
    assert str(decision.layout) == becomes
    assert decision.restore is not None and decision.restore.step == 10
    assert sum(len(record.devices) for record in left.values()) - decision.layout.world_size == spares  # type: ignore[union-attr]
    assert ("spare" in decision.reason) == bool(spares)
    assert {placement.node for placement in decision.placements} <= set(left)
    assert decision.options


def test_too_few_ranks_left_waits() -> None:
    one = job(spec(resources__min_ranks=4), of_plan=plan(Layout(dp=8), FOUR))
    decision = decide.decide(view({"a": FOUR["a"]}, one), one, dead(), 100.0, POLICY)
    assert decision.kind == "wait" and "at least 4 ranks" in decision.reason and "2 healthy devices" in decision.reason


def test_a_refusing_node_is_not_used() -> None:
    one = job(of_plan=plan(Layout(dp=8), FOUR))
    refused = {"b": NodeVerdict("a", Verdict.REFUSED, 99.0)}
    decision = decide.decide(view(FOUR, one, verdicts=refused), one, dead(), 100.0, POLICY)
    assert "b" not in {placement.node for placement in decision.placements}


def test_a_user_error_fails_at_once_with_the_text() -> None:
    one = job(of_plan=plan(Layout(dp=8), FOUR))
    decision = decide.decide(view(FOUR, one), one, dead("user_error"), 100.0, POLICY)
    assert (decision.kind, decision.reason) == ("fail", "it died")


@pytest.mark.parametrize(("restarts", "kind"), [(0, "replan"), (2, "replan"), (3, "fail")])
def test_the_budget_counts_faults(restarts: int, kind: str) -> None:
    one = job(spec(resources__max_restarts=3), of_plan=plan(Layout(dp=8), FOUR), restarts=restarts)
    assert decide.decide(view(FOUR, one), one, dead(), 100.0, POLICY).kind == kind


def with_incidents(one: Job, *steps: int) -> Job:
    events = {
        f"{at:018d}-0000": Event(
            at=float(at), kind="incident", job="j", message="", data={"kind": "dead_rank", "step": step}
        )
        for at, step in enumerate(steps)
    }
    return replace(one, events=events)


@pytest.mark.parametrize(
    ("earlier", "delay"),
    [((), None), ((3,), None), ((12,), 1.0), ((12, 12), 2.0), ((12, 12, 12), 4.0), ((12, 3), None), ((12,) * 9, 30.0)],
)
def test_only_failures_at_the_same_step_back_off(earlier: tuple[int, ...], delay: float | None) -> None:
    one = with_incidents(job(of_plan=plan(Layout(dp=8), FOUR)), *earlier)
    decision = decide.decide(view(FOUR, one, ranks=ranks_at(12, 8)), one, dead("dead_rank"), 100.0, POLICY)
    assert decision.kind == ("wait" if delay else "replan")
    assert decision.until == (100.0 + delay if delay else None)


def test_a_damaged_checkpoint_goes_back_to_the_next_older_one() -> None:
    one = job(of_plan=plan(Layout(dp=8), FOUR), checkpoints=(checkpoint(10), checkpoint(20)))
    damaged = dead("damaged_checkpoint", checkpoint=checkpoint(20).directory)
    decision = decide.decide(view(FOUR, one), one, damaged, 100.0, POLICY)
    assert decision.restore is not None and decision.restore.step == 10


@pytest.mark.parametrize(
    ("history", "records", "bad", "expected"),
    [
        ((), [], (), None),
        (((1, 0),), [(10, 1), (20, 1)], (), (20, 1)),
        (((1, 0), (2, 10)), [(10, 1), (20, 1)], (), (10, 1)),  # written by a ghost after its end
        (((1, 0), (2, 10)), [(10, 1), (20, 1), (20, 2)], (), (20, 2)),
        (((1, 0), (2, 20), (3, 10)), [(10, 1), (20, 1), (30, 2)], (), (10, 1)),
        (((1, 0),), [(10, 1), (20, 1)], ((20, 1),), (10, 1)),
        (((1, 0),), [(10, 1)], ((10, 1),), None),
    ],
)
def test_which_checkpoint_counts(history: Any, records: Any, bad: Any, expected: Any) -> None:
    starts = [GenerationStart(generation=g, start_step=s) for g, s in history]
    bad_directories = [checkpoint(*one).directory for one in bad]
    found = newest_checkpoint([checkpoint(*one) for one in records], starts, bad_directories)
    assert (found and (found.step, found.generation)) == expected


def on_disk(*checkpoints: tuple[int, int], gone: tuple[tuple[int, int], ...] = ()) -> OnDisk:
    found = (RestorePoint(step=s, generation=g, directory=checkpoint(s, g).directory) for s, g in checkpoints)
    return OnDisk(tuple(found), frozenset(checkpoint(*one).directory for one in gone))


@pytest.mark.parametrize(
    ("disk", "restored"),
    [
        (OnDisk(), 20),  # it could not be listed
        (on_disk((10, 1), (20, 1), (30, 1)), 30),  # the index is behind
        (on_disk((10, 1), (40, 1), gone=((20, 1),)), 40),  # retention went on as well
        (on_disk((10, 1), gone=((20, 1),)), 10),
        (on_disk(gone=((10, 1), (20, 1))), 0),
        (on_disk((20, 1), (60, 0)), 20),  # a ghost's
    ],
)
def test_the_disk_corrects_the_index(disk: OnDisk, restored: int) -> None:
    saved = (checkpoint(10), checkpoint(20))
    one = job(of_plan=plan(Layout(dp=8), FOUR, history=((0, 0), (1, 0))), checkpoints=saved, on_disk=disk)
    decision = decide.decide(view(FOUR, one), one, dead(), 100.0, POLICY)
    assert decision.kind == "replan" and (decision.restore.step if decision.restore else 0) == restored


def test_nothing_is_planned_before_somebody_has_looked_at_the_disk() -> None:
    one = job(of_plan=plan(Layout(dp=8), FOUR), checkpoints=(checkpoint(10),), on_disk=None)
    assert decide.decide(view(FOUR, one), one, dead(), 100.0, POLICY) == decide.LOOK
    action = reconcile(view(FOUR, one, verdicts={"b": NodeVerdict("a", Verdict.REFUSED, 99.0)}), one, 100.0, POLICY)
    assert action.look_at_disk and action.status is None


class TestGrowth:
    small = plan(Layout(dp=6), nodes_without("d"), created_at=50.0)

    def decision(self, one: Job, nodes: dict[str, Any] = FOUR, now: float = 100.0, **more: Any) -> decide.Decision:
        return decide.growth(view(nodes, one, ranks=ranks_at(5, 6, step_s=0.5), **more), one, now, POLICY)

    def test_a_free_node_that_pays_is_taken(self) -> None:
        decision = self.decision(job(of_plan=self.small))
        assert decision.kind == "drain" and "predicted" in decision.reason

    def test_not_within_the_settling_time(self) -> None:
        decision = self.decision(job(of_plan=self.small, changed_at=97.0))
        assert (decision.kind, decision.until) == ("wait", 102.0)

    def test_not_for_a_run_that_is_about_to_end(self) -> None:
        assert self.decision(job(spec(train__train_steps=8), of_plan=self.small)).kind == "none"

    def test_not_beyond_what_the_job_wants(self) -> None:
        assert self.decision(job(spec(resources__ranks=6), of_plan=self.small)).kind == "none"

    def test_not_when_one_more_device_changes_nothing(self) -> None:
        nodes = {**nodes_without("c", "d"), "e": node("e", devices=1)}
        four = plan(Layout(dp=4), nodes_without("c", "d"), created_at=50.0)
        assert self.decision(job(of_plan=four), nodes).kind == "none"

    def test_back_to_the_layout_that_the_user_fixed(self) -> None:
        """Even where another layout is predicted to be faster."""
        fixed = spec(layout=Layout(tp=2, pp=2, dp=2).model_dump())
        decision = self.decision(job(fixed, of_plan=self.small))
        assert decision.kind == "drain" and decision.layout == fixed.layout
        assert decision.reason.count("the layout that the job asks for") == 1

    def test_not_away_from_the_layout_that_the_user_fixed(self) -> None:
        fixed = spec(layout=Layout(dp=6).model_dump())
        assert self.decision(job(fixed, of_plan=self.small)).kind == "none"

    def test_not_while_another_job_waits(self) -> None:
        one = job(of_plan=self.small)
        waiting = replace(job(state=JobState.QUEUED), id="k")
        assert decide.growth(view(FOUR, one, waiting, ranks=ranks_at(5, 6)), one, 100.0, POLICY).kind == "none"


class TestAfterDrain:
    two = nodes_of("a b")

    def drained(self, *checkpoints: int, missing: bool = False, **more: Any) -> Job:
        ends = [
            outcome(self.two["a"], exit_of(0, complete=True, step=17), all_gone=True),
            outcome(self.two["b"], exit_of(2, complete=True, step=17), all_gone=not missing),
        ]
        saved = tuple(checkpoint(step) for step in checkpoints)
        running = plan(Layout(dp=4), self.two, stop="save")
        return job(of_plan=running, outcomes=tuple(ends), checkpoints=saved, drain_for="grow", **more)

    def test_the_next_generation_starts_where_the_drained_one_saved(self) -> None:
        one = self.drained(10, 17)
        decision = decide.after_drain(view(FOUR, one), one, 100.0, POLICY)
        assert decision.kind == "replan" and decision.restore is not None
        assert (decision.restore.step, str(decision.layout)) == (17, "TP1·PP1·DP8")

    def test_not_before_everybody_is_gone(self) -> None:
        one = self.drained(10, 17, missing=True)
        assert decide.after_drain(view(FOUR, one), one, 100.0, POLICY).kind == "none"

    def test_the_index_may_lag_a_little(self) -> None:
        one = self.drained(10)
        decision = decide.after_drain(view(FOUR, one), one, 100.5, POLICY)
        assert (decision.kind, decision.until) == ("wait", 102.0)

    def test_but_not_for_ever(self) -> None:
        one = self.drained(10)
        decision = decide.after_drain(view(FOUR, one), one, 102.0, POLICY)
        assert decision.kind == "replan" and decision.restore is not None and decision.restore.step == 10


class TestQueue:
    def test_a_fixed_layout_waits_for_enough_devices(self) -> None:
        one = job(spec(layout=Layout(tp=2, pp=2, dp=2).model_dump()), state=JobState.QUEUED)
        decision = decide.first_placement(view(nodes_of("a b"), one), one)
        assert decision.kind == "wait" and "needs 8 ranks" in decision.reason

    def test_first_come_first_served(self) -> None:
        running = job(of_plan=plan(Layout(dp=8), FOUR))
        first = replace(job(state=JobState.QUEUED), id="k")
        second = replace(job(state=JobState.QUEUED), id="l")
        both = view(FOUR, running, first, second)
        assert "waiting for devices" in decide.first_placement(both, first).reason
        assert decide.first_placement(both, second).reason == "waiting in the queue behind k"

    def test_nobody_waits_behind_a_job_that_the_controller_fails_on(self) -> None:
        failing = replace(job(state=JobState.QUEUED, trouble="KeyError: 1"), id="k")
        second = replace(job(state=JobState.QUEUED), id="l")
        both = view(FOUR, failing, second)
        assert decide.first_placement(both, second).kind == "replan"
        assert decide.first_placement(both, failing).kind == "replan"  # its turn comes before the second's

    def test_a_job_that_can_never_fit_blocks_nobody(self) -> None:
        huge = replace(job(spec(resources__min_ranks=40), state=JobState.QUEUED), id="k")
        small = replace(job(state=JobState.QUEUED), id="l")
        assert decide.first_placement(view(FOUR, huge, small), small).kind == "replan"

    def test_devices_of_an_ended_job_are_free_once_its_ranks_are_gone(self) -> None:
        nodes = nodes_of("a b")
        small = replace(job(state=JobState.QUEUED), id="k")
        ended = job(
            of_plan=plan(Layout(dp=4), nodes), state=JobState.FAILED, outcomes=(outcome(nodes["a"], all_gone=True),)
        )
        both = view(nodes, ended, small)
        assert [(free.record.node, len(free.devices)) for free in free_nodes(both, small)] == [("a", 2)]

    def test_devices_of_an_older_generation_are_held_until_its_ranks_are_gone(self) -> None:
        nodes = nodes_of("a b")
        waiting = replace(job(state=JobState.QUEUED), id="k")
        old, new = plan(Layout(dp=4), nodes), plan(Layout(dp=2), {"a": nodes["a"]}, generation=2)

        def free(**told: Any) -> list[str]:
            moved = replace(
                job(of_plan=new), plans={1: old, 2: new}, outcomes={1: {"b": outcome(nodes["b"], **told)}, 2: {}}
            )
            return [free.record.node for free in free_nodes(view(nodes, moved, waiting), waiting)]

        assert free(all_gone=False) == []
        assert free(all_gone=True) == ["b"]


def test_tp_groups_are_placed_within_nodes() -> None:
    nodes = {"a": node("a", devices=3), "b": node("b", devices=4), "c": node("c", devices=1)}
    free = free_nodes(view(nodes), job(state=JobState.QUEUED))
    placed = place(Layout(tp=2, dp=3), free)
    assert [(p.node, p.ranks, p.devices) for p in placed] == [("a", (0, 1), (0, 1)), ("b", (2, 3, 4, 5), (0, 1, 2, 3))]


def test_nodes_of_the_present_plan_come_first() -> None:
    one = job(of_plan=plan(Layout(dp=4), {"c": FOUR["c"], "b": FOUR["b"]}))
    assert [free.record.node for free in free_nodes(view(FOUR, one), one)] == ["c", "b", "a", "d"]


def test_a_node_without_a_beat_of_this_life_gets_no_work() -> None:
    one = job(state=JobState.QUEUED)
    seen = view(nodes_of("a b"), one)
    mute = replace(seen, beats={"a": seen.beats["a"]})
    assert [free.record.node for free in free_nodes(mute, one)] == ["a"]
