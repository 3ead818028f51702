"""Pruning by hand keeps good checkpoints only, and never deletes the last of them."""

from __future__ import annotations

import pytest

from engine.checkpoint.catalog import delete, directory_name, list_checkpoints
from engine.checkpoint.fence import claim
from engine.checkpoint.quarantine import set_aside
from engine.checkpoint.retention import history_on_disk, plan_prune
from engine.planning.layout import Layout
from tests.engine.checkpoint.synthetic import filled, pieces_of, save_all


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"


def save(directory, step, generation=1):
    return save_all(directory, Layout(), [filled(pieces_of(Layout(), 0))], step=step, generation=generation)


def damage(checkpoint):
    shard = checkpoint / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


def names(entries):
    return [(entry.step, entry.generation) for entry in entries]


def test_the_newest_stay_when_they_are_good(directory):
    for step in (5, 10, 15, 20):
        save(directory, step)
    read = []
    plan = plan_prune(directory, 2, read.append)
    assert (names(plan.kept), plan.damaged, names(plan.expendable)) == ([(20, 1), (15, 1)], (), [(10, 1), (5, 1)])
    assert sum(read) == sum(f.stat().st_size for e in plan.kept for f in e.directory.glob("shard*"))
    delete(plan.expendable)
    assert names(list_checkpoints(directory)) == [(20, 1), (15, 1)]
    unread = []
    assert plan_prune(directory, 2, unread.append).expendable == () and not unread
    with pytest.raises(ValueError, match="keep 0"):
        plan_prune(directory, 0)


def test_damaged_ones_do_not_count_and_stay(directory):
    for step in (5, 10, 15, 20):
        save(directory, step)
    for step in (20, 15):
        damage(directory / directory_name(step, 1))
    plan = plan_prune(directory, 1)
    assert names(plan.kept) == [(10, 1)] and names(plan.expendable) == [(5, 1)]
    assert names([entry for entry, _ in plan.damaged]) == [(20, 1), (15, 1)]
    assert all(findings for _, findings in plan.damaged)
    assert plan_prune(directory, 2).expendable == ()


def test_when_none_is_good_all_complete_ones_stay(directory):
    for step, generation in ((5, 1), (10, 2), (15, 2), (20, 1)):
        damage(save(directory, step, generation))
    (directory / directory_name(12, 1)).mkdir()
    plan = plan_prune(directory, 1)
    assert plan.kept == () and names(plan.expendable) == [(12, 1)], "of the left-overs the older generation's go"
    assert "no checkpoint is good" in plan.note


def test_a_ghosts_newer_checkpoint_does_not_make_the_real_one_expendable(directory):
    """Generation 1 went on to step 20 while generation 2, started at 10, had saved 15."""
    for step, generation in ((10, 1), (20, 1), (15, 2)):
        save(directory, step, generation)
    assert [(start.generation, start.start_step) for start in history_on_disk(directory)] == [(1, 10), (2, 15)]
    plan = plan_prune(directory, 1)
    assert names(plan.kept) == [(15, 2)] and names(plan.expendable) == [(20, 1), (10, 1)]


def test_while_the_newest_generation_has_not_saved_all_complete_ones_stay(directory):
    """It may have gone back to any of them."""
    for step in (5, 10, 15):
        save(directory, step)
    (directory / directory_name(20, 1)).mkdir()
    claim(directory, 2)
    plan = plan_prune(directory, 1)
    assert names(plan.kept) == [(15, 1), (10, 1), (5, 1)] and names(plan.expendable) == [(20, 1)]
    assert "generation 2 has begun and not saved yet" in plan.note
    save(directory, 15, 2)
    assert names(plan_prune(directory, 1).expendable) == [(20, 1), (15, 1), (10, 1), (5, 1)]


def test_what_the_newest_generation_is_writing_and_what_was_set_aside_is_left_alone(directory):
    for step in (5, 10):
        save(directory, step)
    aside = set_aside(save(directory, 15), "NaN")
    (directory / directory_name(20, 1)).mkdir()
    claim(directory, 1)
    delete(plan_prune(directory, 1).expendable)
    assert {path.name for path in directory.iterdir()} == {
        directory_name(20, 1),
        directory_name(10, 1),
        aside.name,
        "generation-1",
    }


def test_a_save_during_the_check_changes_nothing_of_what_stays(directory):
    for step in (5, 10):
        save(directory, step)
    saved = []

    def on_bytes(num_bytes):
        if not saved:
            saved.append(save(directory, 15))

    plan = plan_prune(directory, 1, on_bytes)
    assert saved and names(plan.kept) == [(10, 1)] and names(plan.expendable) == [(5, 1)]
