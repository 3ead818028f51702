"""The demo's figures from synthetic logs: rolled-back steps, losses, seconds and phases."""

from __future__ import annotations

import json

import pytest

from engine.planning.messages import GenerationStart
from everstep.cli.demo_report import (
    SPLIT,
    Kill,
    StepLine,
    max_relative_loss_difference,
    read_metrics,
    read_run_metrics,
    recoveries_of,
    steps_lost,
    surviving_lines,
)


def lines(first: int, last: int, *, at: float = 0.0, loss: float = 8.0) -> list[StepLine]:
    """Steps first..last, one a second from ``at``."""
    return [StepLine(step, loss - step / 100, at + step - first) for step in range(first, last + 1)]


HISTORY = [GenerationStart(generation=g, start_step=s) for g, s in ((1, 0), (2, 10), (3, 17))]
LINES = {1: lines(1, 14, at=100.0), 2: lines(11, 17, at=116.0), 3: lines(18, 25, at=125.0)}


def test_rolled_back_steps_do_not_count():
    survivors = surviving_lines(HISTORY, LINES)
    assert [line.step for line in survivors] == list(range(1, 26))
    assert [line.at for line in survivors if line.step in (10, 11)] == [109.0, 116.0]


def test_a_later_generation_may_begin_before_an_earlier_one():
    history = [GenerationStart(generation=g, start_step=s) for g, s in ((1, 0), (2, 10), (3, 5))]
    survivors = surviving_lines(history, {1: lines(1, 12), 2: lines(11, 13), 3: lines(6, 9, at=50.0)})
    assert [line.step for line in survivors] == list(range(1, 10))
    assert survivors[5].at == 50.0


def test_a_generation_without_a_step_is_no_gap():
    history = [GenerationStart(generation=g, start_step=s) for g, s in ((1, 0), (2, 10), (3, 10))]
    survivors = surviving_lines(history, {1: lines(1, 12), 3: lines(11, 15)})
    assert [line.step for line in survivors] == list(range(1, 16))


@pytest.mark.parametrize(
    "broken",
    [
        {**LINES, 2: [line for line in LINES[2] if line.step != 13]},  # missing
        {**LINES, 3: [LINES[3][0], *LINES[3]]},  # twice
        {**LINES, 1: LINES[1][1:]},  # no first step
    ],
)
def test_a_step_that_is_missing_or_there_twice_is_an_error(broken):
    with pytest.raises(ValueError, match="surviving history has step"):
        surviving_lines(HISTORY, broken)


def test_steps_lost_are_completed_steps_beyond_the_restored_one():
    assert steps_lost(LINES[1], 10) == 4
    assert steps_lost(LINES[1], 14) == 0
    assert steps_lost([*LINES[1], LINES[1][-1]], 10) == 4
    assert steps_lost([], 10) == 0


def test_largest_relative_loss_difference():
    twin = lines(1, 25)
    assert max_relative_loss_difference(surviving_lines(HISTORY, LINES), twin) == 0.0
    other = [StepLine(line.step, line.loss * (1 + 3e-5 * (line.step == 20)), 0.0) for line in twin]
    assert max_relative_loss_difference(twin, other) == pytest.approx(3e-5, rel=1e-3)
    with pytest.raises(ValueError, match="25 steps, its twin 24"):
        max_relative_loss_difference(twin, twin[:-1])


def recovered(kind: str, old: int, new: int, restored: int, at: float, **split: float) -> dict[str, object]:
    return {
        "kind": kind,
        "at": at,
        "down_since": at,
        "old_generation": old,
        "generation": new,
        "restored_step": restored,
        "old_layout": f"L{old}",
        "new_layout": f"L{new}",
        "split": {**dict.fromkeys(SPLIT, 0.0), **split},
    }


NODE_LOST = recovered("dead_node", 1, 2, 10, 113.6, detect=0.4, decide=0.1, stop=0.2, start=0.5, first_step=1.0)
GROW = recovered("grow", 2, 3, 17, 122.0, stop=0.5, meet=0.25, first_step=1.5)
KILL = Kill(at=113.5, generation=1)


def test_seconds_run_from_the_kill_to_the_first_step_of_the_new_generation():
    lost, grown = recoveries_of([NODE_LOST, GROW], LINES, KILL)
    assert (lost.kind, lost.seconds, lost.steps_lost) == ("node_lost", 2.5, 4)
    # The service saw the fault at 114.0 and dates it to 113.6; the demo killed at 113.5.
    assert lost.split["detect"] == pytest.approx(0.5)
    assert sum(lost.split.values()) == pytest.approx(lost.seconds)
    assert (lost.from_layout, lost.to_layout) == ("L1", "L2")
    # The pause: the old generation's last line at 122, the new one's first at 125.
    assert (grown.kind, grown.seconds, grown.steps_lost) == ("grow", 3.0, 0)
    assert grown.split["other"] == pytest.approx(0.75)
    assert set(grown.as_json()["split"]) == {*SPLIT, "other"}


def test_a_recovery_that_needed_two_generations_counts_from_the_kill():
    second_try = recovered("dead_rank", 2, 3, 10, 115.0, detect=0.1)
    (only,) = recoveries_of([second_try], {1: LINES[1], 2: [], 3: lines(11, 20, at=118.0)}, KILL)
    assert (only.kind, only.seconds, only.steps_lost, only.from_generation) == ("node_lost", 4.5, 4, 1)


def test_a_fault_that_nobody_caused_is_listed_as_what_it_is():
    stray = recovered("dead_rank", 2, 3, 17, 122.5)
    assert [r.kind for r in recoveries_of([NODE_LOST, stray], LINES, KILL)] == ["node_lost", "dead_rank"]


def test_a_recovery_without_a_step_is_an_error():
    with pytest.raises(ValueError, match="generation 2 completed no step"):
        recoveries_of([NODE_LOST], {1: LINES[1]}, KILL)


def test_metrics_files_are_read_without_a_half_written_line(tmp_path):
    (tmp_path / "metrics").mkdir()
    file = tmp_path / "metrics" / "g0002.jsonl"
    whole = [json.dumps({"step": s, "loss": 2.5, "at": 7.0, "tokens_per_s": 10.0, "lr": 0.1}) for s in (1, 2)]
    file.write_text("\n".join(whole) + '\n{"step":3,"lo')
    assert [line.step for line in read_metrics(file)] == [1, 2]
    assert read_run_metrics(tmp_path, HISTORY[:2]) == {1: [], 2: read_metrics(file)}
