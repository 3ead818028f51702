"""``python -m engine.checkpoint.inspect``: what it prints and its exit codes, without a process of its own."""

from __future__ import annotations

import json
import shutil
import signal

import pytest

from engine.checkpoint.catalog import directory_name
from engine.checkpoint.inspect import main
from tests.golden.make import GOLDEN

SOURCE = GOLDEN / "format-1" / directory_name(3, 1)


@pytest.fixture
def run(capsys):
    """Run the program; returns (exit code, its last line)."""
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert all(line["kind"] == "progress" for line in lines[:-1])
        return code, lines[-1]

    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def job(tmp_path):
    """A run directory with complete checkpoints after steps 5, 10 and 15."""
    for step in (5, 10, 15):
        shutil.copytree(SOURCE, tmp_path / "job" / "checkpoints" / directory_name(step, 1))
    return tmp_path / "job"


def checkpoint(job, step=15):
    return job / "checkpoints" / directory_name(step, 1)


def test_list_shows_every_state_newest_first(job, run):
    checkpoints = job / "checkpoints"
    shutil.copytree(SOURCE, checkpoints / directory_name(12, 2))
    (checkpoints / directory_name(20, 2)).mkdir()
    (checkpoints / directory_name(20, 2) / "shard-00000.safetensors").write_bytes(b"12345")
    run("quarantine", checkpoint(job, 10), "--reason", "gives NaN")
    (checkpoint(job, 5) / "manifest.json").write_text("text")
    for directory in (job, checkpoints):
        code, answer = run("list", directory)
        assert code == 0 and answer["directory"] == str(checkpoints)
        found = [(one["step"], one["generation"], one["state"]) for one in answer["checkpoints"]]
        assert found == [
            (20, 2, "incomplete"),
            (15, 1, "superseded"),
            (12, 2, "complete"),
            (10, 1, "quarantined"),
            (5, 1, "complete"),
        ]
    rows = {one["step"]: one for one in answer["checkpoints"]}
    assert rows[20]["num_bytes"] == 5 and rows[20]["layout"] is None
    assert rows[12]["num_bytes"] == sum(f.stat().st_size for f in SOURCE.glob("shard*"))
    assert rows[12]["layout"]["tp"] == 2 and rows[12]["problem"] is None
    assert rows[10]["problem"] == "gives NaN"
    assert "manifest.json: is no JSON" in rows[5]["problem"]


def test_show_says_what_the_manifest_says(job, run):
    code, answer = run("show", checkpoint(job), "--tensors")
    assert code == 0
    assert (answer["step"], answer["consumed_samples"], answer["generation"]) == (3, 12, 1)
    assert answer["model"]["hidden_size"] == 8 and answer["layout"]["dp"] == 2 and "torch" in answer["versions"]
    assert answer["num_tensors"] == len(answer["tensors"]) == 36
    assert answer["num_boxes"] == sum(one["boxes"] for one in answer["tensors"])
    assert answer["kinds"].keys() == {"weight", "exp_avg", "exp_avg_sq"}
    assert answer["kinds"]["weight"]["num_bytes"] == 4 * answer["kinds"]["weight"]["elements"]
    assert "tensors" not in run("show", checkpoint(job))[1]


def truncate(directory):
    (directory / "shard-00001.safetensors").write_bytes(b"")
    return ["shard-00001.safetensors"], False


def cut(directory):
    shard = directory / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    return [shard.name], False


def flip(directory):
    shard = directory / "shard-00001.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[2500] ^= 4
    shard.write_bytes(raw)
    return [shard.name], True


def delete(directory):
    (directory / "shard-00001.safetensors").unlink()
    return ["shard-00001.safetensors"], False


def swap(directory):
    one, two = directory / "shard-00001.safetensors", directory / "shard-00003.safetensors"
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)
    return [one.name, two.name], False


def write_text_over_the_manifest(directory):
    (directory / "manifest.json").write_text("step 15 was here\n")
    return ["manifest.json"], False


@pytest.mark.parametrize("damage", [truncate, cut, flip, delete, swap, write_text_over_the_manifest])
def test_every_damage_is_named_and_the_others_are_good(job, run, damage):
    """P32 (a) to (f) as somebody sees them who looks before starting the job again."""
    files, tensor_known = damage(checkpoint(job))
    code, answer = run("verify", job)
    assert code == 1 and not answer["good"]
    bad, *others = answer["checkpoints"]
    assert bad["directory"] == str(checkpoint(job)) and not bad["good"]
    assert all(one["good"] and one["findings"] == [] for one in others) and len(others) == 2
    assert {finding["file"] for finding in bad["findings"]} == {str(checkpoint(job) / file) for file in files}
    if tensor_known:
        (finding,) = bad["findings"]
        assert finding["tensor"] == "weight/layers.0.mlp.gate.weight" and finding["box"] == "[6:12, 0:8]"
        assert finding["tensor"] in finding["reason"]
    assert run("verify", checkpoint(job))[0] == 1
    assert run("verify", checkpoint(job, 10))[0] == 0


def test_verify_reads_everything_and_tells_how_much(job, run):
    code, answer = run("verify", job)
    size = sum(f.stat().st_size for f in SOURCE.glob("shard*"))
    assert code == 0 and answer["good"] and answer["bytes_read"] == 3 * size


def test_diff_of_equal_and_of_different_ones(job, run, tmp_path):
    code, answer = run("diff", checkpoint(job, 5), checkpoint(job, 10))
    assert code == 0 and answer["same"] and answer["bit_equal"] and answer["different"] == []
    assert {kind: one["bit_equal"] for kind, one in answer["kinds"].items()} == dict.fromkeys(answer["kinds"], 12)
    for tolerance in ("-1", "nan", "inf"):
        assert run("diff", checkpoint(job, 5), checkpoint(job, 10), f"--tolerance={tolerance}")[0] == 2
    flip(checkpoint(job, 10))
    code, answer = run("diff", checkpoint(job, 5), checkpoint(job, 10))
    assert code == 1 and answer["kind"] == "error" and "shard-00001.safetensors" in answer["error"]


def test_prune_tells_first_and_deletes_when_told(job, run):
    flip(checkpoint(job))
    code, answer = run("prune", job, "--keep", 1)
    assert code == 1 and answer["dry_run"] and answer["deleted"] == []
    assert [one["step"] for one in answer["damaged"]] == [15] and [one["step"] for one in answer["kept"]] == [10]
    assert answer["damaged"][0]["findings"][0]["tensor"] == "weight/layers.0.mlp.gate.weight"
    assert checkpoint(job, 5).exists()
    code, answer = run("prune", job, "--keep", 1, "--yes")
    assert answer["deleted"] == [str(checkpoint(job, 5))] and not checkpoint(job, 5).exists()
    assert checkpoint(job, 10).exists() and checkpoint(job, 15).exists()
    run("quarantine", checkpoint(job), "--reason", "damaged")
    assert run("prune", job, "--keep", 1)[0] == 0


def test_quarantine_and_release(job, run):
    code, answer = run("quarantine", checkpoint(job), "--reason", "gives NaN")
    assert code == 0 and answer["was"] == str(checkpoint(job)) and not checkpoint(job).exists()
    assert run("verify", answer["directory"])[0] == 0
    assert run("release", answer["directory"])[1]["directory"] == str(checkpoint(job))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["list", "nowhere"], "no such directory: nowhere"),
        (["list", "."], "holds no checkpoints"),
        (["list", "job/checkpoints/step-000000015.g1"], "is a checkpoint itself"),
        (["show", "nowhere"], "no such directory"),
        (["verify", "nowhere"], "no such directory"),
        (["verify", "."], "holds no checkpoints"),
        (["diff", "job/checkpoints/step-000000015.g1", "nowhere"], "no such directory: nowhere"),
        (["prune", "job", "--keep", "0"], "keep 0"),
        (["quarantine", "job", "--reason", "x"], "is no checkpoint"),
        (["release", "job/checkpoints/step-000000015.g1"], "is not set aside"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_right_is_exit_code_2_with_the_reason(job, run, monkeypatch, arguments, reason):
    monkeypatch.chdir(job.parent)
    code, answer = run(*arguments)
    assert code == 2 and answer["kind"] == "error" and reason in answer["error"]


def test_an_incomplete_checkpoint_is_no_good_one(job, run):
    (checkpoint(job) / "manifest.json").unlink()
    for command in ("show", "verify"):
        code, answer = run(command, checkpoint(job))
        assert code == 1 and "manifest.json" in json.dumps(answer) and "No such file" in json.dumps(answer)
