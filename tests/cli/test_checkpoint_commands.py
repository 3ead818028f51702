"""``everstep checkpoint``: looking at checkpoints, with exit codes and one object for scripts."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from everstep.cli.checkpoint import app
from tests.cli.conftest import run_everstep

SOURCE = next((Path(__file__).parents[1] / "golden" / "format-1").glob("step-*"))


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for step in (5, 10, 15):
        shutil.copytree(SOURCE, tmp_path / "checkpoints" / f"step-{step:09d}.g1")
    return tmp_path


def named(job, step):
    return job / "checkpoints" / f"step-{step:09d}.g1"


def flip(checkpoint):
    shard = checkpoint / "shard-00001.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[2500] ^= 4
    shard.write_bytes(raw)


def checkpoint(*arguments):
    return run_everstep("checkpoint", *arguments)


def test_list_and_show_say_what_there_is(job):
    (job / "checkpoints" / "step-000000020.g1").mkdir()
    listed = checkpoint("list", job)
    assert listed.code == 0
    rows = [line for line in listed.stdout.splitlines() if "step-" in line]
    assert ["incomplete" in row for row in rows] == [True, False, False, False]
    assert "TP2·PP1·DP2" in rows[1] and "17.0 kB" in rows[1] and "step-000000015.g1" in rows[1]
    shown = checkpoint("show", named(job, 15), "--tensors", "--json")
    assert shown.code == 0 and shown.json["step"] == 3 and len(shown.json["tensors"]) == 36
    assert "layers.0.mlp.gate.weight" in shown.stderr and "TP2·PP1·DP2" in shown.stderr


def test_damage_is_found_named_and_set_aside(job):
    flip(named(job, 15))
    found = checkpoint("verify", job, "--json")
    assert found.code == 1 and [one["good"] for one in found.json["checkpoints"]] == [False, True, True]
    assert "weight/layers.0.mlp.gate.weight [6:12, 0:8]" in found.stderr and "shard-00001.safetensors" in found.stderr
    aside = checkpoint("quarantine", named(job, 15), "--reason", "--- cosmic [ray]")
    assert aside.code == 0 and not named(job, 15).exists()
    listed = checkpoint("list", job)
    assert "quarantined" in listed.stdout and "--- cosmic [ray]" in listed.stdout
    pruned = checkpoint("prune", job, "--keep", 1, "--yes")
    assert pruned.code == 0 and "deleted" in pruned.stdout
    assert not named(job, 5).exists() and named(job, 10).exists()
    back = checkpoint("quarantine", job / "checkpoints" / "bad-step-000000015.g1", "--release", "--json")
    assert back.code == 0 and back.json["directory"] == str(named(job, 15))
    assert named(job, 15).exists()


def test_the_commands_on_the_page_run(job):
    """Equal checkpoints of one run, so all is well everywhere."""
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    section = page.partition("## Looking at checkpoints")[2].partition("```sh")[2].partition("```")[0]
    lines = [line.replace("RUN", str(job)) for line in section.strip().splitlines()]
    commands = {line.split()[2] for line in lines}
    assert commands == {c.name for c in app.registered_commands if c.name not in (None, "convert")}
    for line in lines:
        _, group, *arguments = shlex.split(line)
        answer = run_everstep(group, *arguments)
        assert answer.code == 0, (line, answer.stderr)
    assert not named(job, 5).exists() and named(job, 15).exists()


def test_wrong_input_is_exit_code_2_and_never_a_traceback(job):
    for arguments, reason in [
        (("list", job / "nowhere"), "no such directory"),
        (("prune", job, "--keep", 0), "keep"),
        (("quarantine", named(job, 5)), "--reason"),
        (("quarantine", named(job, 5), "--release", "--reason", "x"), "--release"),
    ]:
        answer = checkpoint(*arguments)
        assert answer.code == 2 and reason in answer.stderr and "Traceback" not in answer.stderr, arguments
