"""The commands against a real controller: answers, exit codes, and errors that name the field."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import run_everstep

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def submit(everstep, spec, tmp_path):
    def submit(*options, **changes):
        for path, value in changes.items():
            *sections, name = path.split("__")
            place = spec
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        file = tmp_path / "spec.yaml"
        file.write_text(yaml.safe_dump(spec))
        return everstep("submit", file, *options)

    return submit


def test_a_job_is_submitted_listed_shown_cancelled_and_watched_to_its_end(submit, everstep):
    submitted = submit("--json")
    assert submitted.code == 0
    job = submitted.json["id"]
    assert job.startswith("tiny-") and submitted.json["state"] == "QUEUED"

    assert job in everstep("list").stdout
    assert everstep("list", "--json", "--state", "QUEUED").json["jobs"][0]["id"] == job
    shown = everstep("show", job, "--json")
    assert shown.json["job"]["train_steps"] == 40
    assert shown.json["events"][0]["kind"] == "submitted"
    assert job in everstep("show", job).stdout

    cancelled = everstep("cancel", job, "--json")
    assert (cancelled.code, cancelled.json["state"]) == (0, "CANCELLED")
    watched = everstep("watch", job, "--json")
    assert (watched.code, watched.json["state"]) == (1, "CANCELLED")
    assert "cancelled on request" in watched.stderr
    again = everstep("cancel", job, "--json")
    assert again.code == 1 and "already ended" in again.json["error"]


@pytest.mark.parametrize(
    ("change", "field", "told"),
    [
        ({"model__num_layer": 4}, "model.num_layer", "unknown field"),
        ({"model__num_attention_heads": 5}, "model.hidden_size", "not divisible by num_attention_heads 5"),
        ({"data__path": "nowhere"}, "data.path", "nowhere"),
        ({"data__path": "../../etc/passwd"}, "data.path", "below"),
        ({"train__train_steps": "many"}, "train.train_steps", "integer"),
        ({"layout": {"tp": 3}}, "layout", "not divisible by layout.tp 3"),
        ({"layout": {"dp": 16}}, "layout", "more than the 8 micro-batches"),
        ({"resources__min_ranks": 4096}, "resources.min_ranks", "4096"),
    ],
)
def test_a_spec_that_cannot_be_run_is_refused_field_by_field(submit, change, field, told):
    answer = submit("--json", **change)
    assert answer.code == 2
    assert any(error["field"].startswith(field) and told in error["message"] for error in answer.json["errors"]), (
        answer.json
    )
    assert field in answer.stderr and "Traceback" not in answer.stderr


def test_every_bad_field_is_shown(submit):
    answer = submit(model__hidden_size=-64, train__lr="fast")
    assert answer.code == 2 and answer.stdout == ""
    assert "model.hidden_size" in answer.stderr and "train.lr" in answer.stderr


@pytest.mark.parametrize("command", ["show", "watch", "cancel"])
@pytest.mark.parametrize("job", ["nothing-000000", "../nodes", "a b?c"])
def test_an_unknown_job_is_bad_input(everstep, command, job):
    answer = everstep(command, job)
    assert answer.code == 2 and "error:" in answer.stderr


def test_empty_lists_are_answers(everstep):
    assert everstep("nodes", "--json").json == {"nodes": []}
    assert "no nodes" in everstep("nodes").stdout
    assert everstep("list", "--state", "PAUSED", "--json").json == {"jobs": []}


@pytest.mark.parametrize("command", [["list"], ["nodes"], ["show", "x"], ["watch", "x"], ["cancel", "x"]])
def test_a_service_that_is_not_there_is_exit_code_3(everstep, command, monkeypatch):
    monkeypatch.setattr("everstep.cli.follow.PATIENCE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    answer = everstep(*command, "--url", f"http://127.0.0.1:{port}", "--json")
    assert answer.code == 3
    assert "everstep up" in answer.json["error"]


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:8500", "http://", "http://[::1", ""])
def test_an_address_that_is_none_is_bad_input(url):
    answer = run_everstep("list", "--url", url)
    assert answer.code == 2 and "--url" in answer.stderr


@pytest.mark.parametrize(
    "arguments", [["submit"], ["no-such-command"], ["up", "--nodes", "0"], ["list", "--state", "X"]]
)
def test_wrong_usage_is_exit_code_2(arguments):
    assert run_everstep(*arguments).code == 2


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_examples_lack_nothing_but_their_corpus(everstep, example):
    answer = everstep("submit", EXAMPLES / example, "--json")
    assert answer.code == 2
    assert [error["field"] for error in answer.json["errors"]] == ["data.path"]
