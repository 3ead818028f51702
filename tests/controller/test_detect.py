"""What is an incident, who is to blame, and when it is better to wait. All times are seconds on one clock."""

from __future__ import annotations

from dataclasses import replace

from controller.detect import Incident, Patience, Suspicion, detect
from controller.view import NodeVerdict, Seen
from engine.planning.layout import Layout
from engine.planning.messages import RestorePoint
from everstep.protocol.link import Verdict
from tests.controller.specs import exit_of, job, nodes_of, outcome, plan, view

NODES = nodes_of("a b")
PLAN = plan(Layout(dp=4), NODES)
PATIENCE = Patience(culprit_s=0.3, verdict_s=1.0, listing_s=3.0)


def look(this_view: object, this_job: object, now: float = 100.0) -> Incident | Suspicion | None:
    return detect(this_view, this_job, now, PATIENCE)  # type: ignore[arg-type]


def incident(found: object) -> Incident:
    assert isinstance(found, Incident), found
    return found


def test_nothing_is_wrong() -> None:
    one = job(of_plan=PLAN, outcomes=(outcome(NODES["a"]), outcome(NODES["b"])))
    assert look(view(NODES, one), one) is None


def test_a_killed_rank_is_named_with_what_is_known_and_no_more() -> None:
    killed = exit_of(2, at=99.9, signal=9, step=12, cause="killed by signal 9, cause unknown")
    one = job(of_plan=PLAN, outcomes=(outcome(NODES["b"], killed),))
    found = incident(look(view(NODES, one), one))
    assert (found.kind, found.ranks, found.nodes, found.at) == ("dead_rank", (2,), ("b",), 99.9)
    assert found.message == "rank 2 on b at step 12: killed by signal 9, cause unknown"


def test_the_first_failure_is_the_culprit_and_echoes_are_not_named() -> None:
    first = exit_of(3, at=99.90, exit_code=1, step=7, category="internal", error="ZeroDivisionError")
    echo = exit_of(0, at=99.85, category="collective")
    stopped = exit_of(1, at=99.95, signal=15, stopped_by_us=True)
    one = job(of_plan=PLAN, outcomes=(outcome(NODES["a"], echo, stopped), outcome(NODES["b"], first)))
    assert incident(look(view(NODES, one), one)).ranks == (3,)


def test_two_ranks_that_die_together_are_both_named_in_order() -> None:
    one = job(
        of_plan=PLAN,
        outcomes=(
            outcome(NODES["a"], exit_of(1, at=99.95, signal=9)),
            outcome(NODES["b"], exit_of(3, at=99.9, signal=9)),
        ),
    )
    assert incident(look(view(NODES, one), one)).ranks == (3, 1)


def test_failed_collectives_alone_wait_for_the_culprit_then_are_named() -> None:
    one = job(of_plan=PLAN, outcomes=(outcome(NODES["a"], exit_of(0, category="collective"), seen_at=100.0),))
    found = look(view(NODES, one), one, now=100.1)
    assert isinstance(found, Suspicion) and found.until == 100.3
    assert incident(look(view(NODES, one), one, now=100.3)).ranks == (0,)


def test_failed_collectives_are_explained_by_a_dead_node() -> None:
    one = job(of_plan=PLAN, outcomes=(outcome(NODES["a"], exit_of(0, category="collective")),))
    refused = {"b": NodeVerdict("a", Verdict.REFUSED, 99.8)}
    found = incident(look(view(NODES, one, verdicts=refused), one))
    assert (found.kind, found.nodes, found.ranks, found.at) == ("dead_node", ("b",), (2, 3), 99.8)


def test_a_refusing_agent_is_dead_now_though_its_lease_lives() -> None:
    one = job(of_plan=PLAN)
    refused = {"a": NodeVerdict("a", Verdict.REFUSED, 99.99)}
    assert incident(look(view(NODES, one, verdicts=refused), one)).nodes == ("a",)


def test_a_silent_agent_is_left_to_its_lease() -> None:
    one = job(of_plan=PLAN)
    silent = {"a": NodeVerdict("a", Verdict.SILENT, 99.0)}
    assert look(view(NODES, one, verdicts=silent), one) is None


def test_a_verdict_on_an_earlier_life_of_the_agent_says_nothing() -> None:
    one = job(of_plan=PLAN)
    assert look(view(NODES, one, verdicts={"a": NodeVerdict("earlier", Verdict.REFUSED, 99.0)}), one) is None


def test_an_agent_started_anew_means_that_the_old_one_died() -> None:
    nodes = {**NODES, "b": NODES["b"].model_copy(update={"incarnation": "z", "started_at": 99.5})}
    one = job(of_plan=PLAN)
    found = incident(look(view(nodes, one), one))
    assert (found.nodes, found.at) == (("b",), 99.5)


class TestLeaseEnded:
    one = job(of_plan=PLAN)
    gone = view({"a": NODES["a"]}, one, departed={"b": Seen(NODES["b"], 100.0)})

    def verdict(self, what: Verdict, at: float) -> object:
        return replace(self.gone, verdicts={"b": NodeVerdict("a", what, at)})

    def test_its_agent_is_asked_first(self) -> None:
        found = look(self.gone, self.one, now=100.1)
        assert isinstance(found, Suspicion) and found.until == 101.0

    def test_no_answer_in_time_is_death(self) -> None:
        assert incident(look(self.gone, self.one, now=101.0)).kind == "dead_node"

    def test_silence_after_that_is_death(self) -> None:
        assert incident(look(self.verdict(Verdict.SILENT, 100.5), self.one, now=100.5)).seen_at == 100.5

    def test_an_older_silence_does_not_count(self) -> None:
        assert isinstance(look(self.verdict(Verdict.SILENT, 99.0), self.one, now=100.1), Suspicion)

    def test_an_agent_that_answers_has_only_lost_etcd(self) -> None:
        assert isinstance(look(self.verdict(Verdict.ALIVE, 100.2), self.one, now=130.0), Suspicion)

    def test_all_leases_ending_at_once_is_no_death_while_agents_answer(self) -> None:
        none = view({}, self.one, departed={name: Seen(NODES[name], 100.0) for name in NODES})
        answered = {name: NodeVerdict("a", Verdict.ALIVE, 100.1) for name in NODES}
        assert isinstance(look(replace(none, verdicts=answered), self.one, now=105.0), Suspicion)


def test_after_a_start_missing_nodes_get_time_to_register() -> None:
    one = job(of_plan=PLAN)
    early = replace(view({"a": NODES["a"]}, one), synced_at=99.0)
    assert isinstance(look(early, one, now=100.0), Suspicion)
    assert incident(look(early, one, now=102.0)).nodes == ("b",)


def test_a_node_whose_part_ended_well_may_leave() -> None:
    one = job(of_plan=PLAN, outcomes=(outcome(NODES["b"], exit_of(2, complete=True), all_gone=True),))
    assert look(view({"a": NODES["a"]}, one, departed={"b": Seen(NODES["b"], 90.0)}), one) is None


def test_a_user_error_blames_no_node() -> None:
    wrong = exit_of(1, category="user", error="ModuleNotFoundError", message="No module named 'nope'")
    one = job(of_plan=PLAN, outcomes=(outcome(NODES["a"], wrong, exit_of(0, category="collective", at=99.0)),))
    found = incident(look(view(NODES, one), one))
    assert (found.kind, found.nodes) == ("user_error", ())
    assert found.message == "rank 1 after 0 steps: ModuleNotFoundError: No module named 'nope'"


def test_a_damaged_checkpoint_is_named_not_the_rank() -> None:
    directory = "/runs/j/checkpoints/step-20.g1"
    restoring = plan(
        Layout(dp=4), NODES, generation=2, restore=RestorePoint(step=20, generation=1, directory=directory)
    )
    broken = exit_of(1, category="checkpoint", file=f"{directory}/shard-1.safetensors", message="checksum")
    one = job(of_plan=restoring, outcomes=(outcome(NODES["a"], broken, generation=2),))
    found = incident(look(view(NODES, one), one))
    assert (found.kind, found.checkpoint, found.nodes) == ("damaged_checkpoint", directory, ())


def test_a_failed_save_is_a_fault_of_the_rank() -> None:
    broken = exit_of(1, category="checkpoint", file="/runs/j/checkpoints/step-30.g1/shard", message="no space left")
    one = job(of_plan=PLAN, outcomes=(outcome(NODES["a"], broken),))
    assert incident(look(view(NODES, one), one)).kind == "dead_rank"


def test_outcomes_of_older_generations_and_other_lives_are_ignored() -> None:
    other_life = NODES["b"].model_copy(update={"incarnation": "earlier"})
    old = replace(
        job(of_plan=PLAN),
        outcomes={
            0: {"a": outcome(NODES["a"], exit_of(0, signal=9))},
            1: {"b": outcome(other_life, exit_of(2, signal=9))},
        },
    )
    assert look(view(NODES, old), old) is None


def test_ending_early_without_being_asked_is_a_fault() -> None:
    ends = tuple(outcome(r, exit_of(i, complete=True, step=5), all_gone=True) for i, r in enumerate(NODES.values()))
    one = job(of_plan=PLAN, outcomes=ends)
    assert "before the run was complete" in incident(look(view(NODES, one), one)).message
