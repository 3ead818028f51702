"""The demo as a user runs it: what it claims is checked, it runs twice in a row, and no end of it leaves anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.audit import processes_with

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def keep(tmp_path_factory) -> Path:
    """All demos of this module share it, so the corpus is made once and the leftovers of each lie around."""
    return tmp_path_factory.mktemp("demo")


def start_demo(keep: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "everstep.cli", "demo", "--json", "--steps", "60", "--keep", str(keep), *options]
    environment = {**os.environ, "EVERSTEP_TEST_MARK": str(keep)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def nothing_left(keep: Path, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while found := processes_with(f"EVERSTEP_TEST_MARK={keep}"):
        if time.monotonic() > deadline:
            raise AssertionError(found)
        time.sleep(0.1)
    return True


def wait_for_text(process: subprocess.Popen[bytes], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text.encode() in line:
            return
    raise AssertionError(f"the demo ended before it said {text!r}")


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("cluster up", signal.SIGINT),
        ("running as", signal.SIGKILL),
        ("SIGKILL", signal.SIGTERM),
        ("SIGKILL", signal.SIGKILL),
        ("draining", signal.SIGINT),
    ],
)
def test_ended_at_any_moment_it_leaves_nothing(keep, text, how):
    with start_demo(keep, "--no-twin") as process:
        wait_for_text(process, text)
        process.send_signal(how)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    assert b"Traceback" not in errors
    assert nothing_left(keep)


@pytest.mark.parametrize("time_around", [1, 2])
def test_it_proves_what_it_claims(keep, time_around):
    with start_demo(keep) as process:
        answer, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()
    assert nothing_left(keep)
    summary = json.loads(answer.splitlines()[-1])
    assert summary["finished"] and summary["samples_each_once"]
    assert summary["max_relative_loss_difference"] <= 1e-4
    assert summary["loss_last"] < summary["loss_first"] - 1
    lost, grown = summary["recoveries"]
    assert (lost["kind"], grown["kind"]) == ("node_lost", "grow")
    assert lost["seconds"] < 3.0 and 0 < lost["steps_lost"] <= 10
    assert grown["seconds"] < 3.0 and grown["steps_lost"] == 0
    for recovery in (lost, grown):
        phases = {"detect", "decide", "stop", "start", "meet", "build", "restore", "first_step", "other"}
        assert set(recovery["split"]) == phases
        assert sum(recovery["split"].values()) == pytest.approx(recovery["seconds"], rel=0.25)
    layouts = [one["layout"] for one in summary["layouts"]]
    assert layouts[0] == layouts[2] == "TP2·PP2·DP2" != layouts[1]
    metrics = Path(summary["paths"]["metrics"])
    assert sorted(path.name for path in metrics.iterdir()) == ["g0001.jsonl", "g0002.jsonl", "g0003.jsonl"]
    assert json.loads((metrics / "g0003.jsonl").read_text().splitlines()[-1])["step"] == 60
