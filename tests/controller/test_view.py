"""The view is what listing etcd gives, however it was reached: by changes or by a listing."""

from __future__ import annotations

from dataclasses import replace

from controller.view import ClusterView, on_change, on_snapshot
from engine.planning.layout import Layout
from engine.planning.messages import Message
from everstep.protocol.keys import Keys
from everstep.protocol.store import Change, KeyValue, Snapshot
from tests.controller.specs import beat, checkpoint, exit_of, job, node, nodes_of, outcome, plan, rank_status

KEYS = Keys("/t")
NODES = nodes_of("a b")


def item(key: str, message: Message | bytes, revision: int = 1) -> KeyValue:
    value = message if isinstance(message, bytes) else message.model_dump_json().encode()
    return KeyValue(key=key, value=value, mod_revision=revision, create_revision=1)


def everything() -> list[KeyValue]:
    one = job(of_plan=plan(Layout(dp=4), NODES))
    assert one.spec and one.status and one.plan
    return [
        item(KEYS.leader, b"me", 1),
        item(KEYS.node("a"), NODES["a"], 2),
        item(KEYS.node("b"), NODES["b"], 3),
        item(KEYS.beat("a"), beat(NODES["a"], rank_status("j", 1, 0, 7)).value, 4),
        item(KEYS.spec("j"), b"" + one.spec.model_dump_json().encode(), 5),
        item(KEYS.status("j"), one.status, 6),
        item(KEYS.plan("j"), one.plan, 7),
        item(KEYS.plan_of("j", 1), one.plan, 8),
        item(KEYS.outcome("j", 1, "b"), outcome(NODES["b"], exit_of(2, signal=9)).value, 9),
        item(KEYS.checkpoint("j", 10, 1), checkpoint(10), 10),
    ]


def by_changes(items: list[KeyValue], view: ClusterView | None = None, now: float = 100.0) -> ClusterView:
    view = view or on_snapshot(ClusterView(), Snapshot(0, ()), KEYS, now)
    for one in items:
        view = on_change(view, Change(one.mod_revision, one.key, one), KEYS, now)
    return view


def deleted(view: ClusterView, key: str, now: float) -> ClusterView:
    return on_change(view, Change(view.revision + 1, key, None), KEYS, now)


def test_changes_and_a_listing_give_the_same() -> None:
    listed = on_snapshot(ClusterView(), Snapshot(10, tuple(everything())), KEYS, 100.0)
    assert by_changes(everything()) == listed
    assert listed.step_of(listed.jobs["j"]) == 7
    assert listed.jobs["j"].status_revision == 6


def test_the_old_view_is_never_changed() -> None:
    before = by_changes(everything())
    kept = replace(before, jobs=dict(before.jobs), nodes=dict(before.nodes))
    after = deleted(before, KEYS.node("a"), 101.0)
    assert before == kept and "a" not in after.nodes


def test_a_node_that_leaves_is_remembered_with_its_last_beat() -> None:
    view = deleted(deleted(by_changes(everything()), KEYS.beat("a"), 101.0), KEYS.node("a"), 101.0)
    assert view.departed["a"].at == 101.0
    assert view.step_of(view.jobs["j"]) == 7
    assert not view.healthy("a")


def test_a_node_missing_from_a_new_listing_has_left() -> None:
    rest = [one for one in everything() if not one.key.endswith("/a")]
    view = on_snapshot(by_changes(everything()), Snapshot(20, tuple(rest)), KEYS, 105.0)
    assert set(view.nodes) == {"b"} and view.departed["a"].at == 105.0


def test_a_node_that_comes_back_has_not_left() -> None:
    view = deleted(by_changes(everything()), KEYS.node("a"), 101.0)
    anew = node("a", incarnation="z")
    view = by_changes([item(KEYS.node("a"), anew, 12)], view)
    assert "a" not in view.departed
    assert not view.healthy("a")  # no beat of this life yet
    assert by_changes([item(KEYS.beat("a"), beat(anew).value, 13)], view).healthy("a")


def test_a_listing_tells_nothing_new_about_an_outcome() -> None:
    view = on_snapshot(by_changes(everything()), Snapshot(20, tuple(everything())), KEYS, 300.0)
    assert view.jobs["j"].outcomes[1]["b"].at == 100.0


def test_what_cannot_be_read_is_noted_and_hurts_nobody() -> None:
    view = by_changes([item(KEYS.node("c"), b"{not json", 12)], by_changes(everything()))
    assert KEYS.node("c") in view.unreadable and set(view.nodes) == {"a", "b"}
    assert KEYS.node("c") not in by_changes([item(KEYS.node("c"), node("c"), 13)], view).unreadable


def test_ranks_of_older_generations_and_other_lives_are_ignored() -> None:
    view = by_changes(
        [item(KEYS.beat("a"), beat(NODES["a"], rank_status("j", 0, 0, 99)).value, 12)], by_changes(everything())
    )
    assert view.ranks_of(view.jobs["j"]) == []
    other = node("a", incarnation="z")
    view = by_changes([item(KEYS.beat("a"), beat(other, rank_status("j", 1, 0, 99)).value, 13)], view)
    assert view.ranks_of(view.jobs["j"]) == []
