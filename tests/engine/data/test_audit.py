"""The audit of sample logs: rolled-back steps do not count, and every way to miss or repeat a sample is seen."""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine.data.audit import main
from engine.data.indexed import CorpusWriter
from engine.data.order import samples_of_step
from engine.planning.config import RunConfig

SEQ, BATCH, STEPS, NUM_SAMPLES = 8, 6, 12, 40
HISTORY = [{"generation": 1, "start_step": 0}, {"generation": 2, "start_step": 5}, {"generation": 3, "start_step": 9}]
PARTS = {1: [3, 3], 2: [2, 2, 2], 3: [6]}  # samples of each replica


@pytest.fixture
def run(tmp_path) -> RunConfig:
    with CorpusWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add_document(np.arange(NUM_SAMPLES * SEQ + 1) % 7)
    return RunConfig.model_validate(
        {
            "model": {
                "num_layers": 1,
                "hidden_size": 8,
                "num_attention_heads": 1,
                "ffn_hidden_size": 8,
                "vocab_size": 7,
                "max_sequence_length": SEQ,
            },
            "data": {"path": str(tmp_path / "corpus")},
            "train": {
                "sequence_length": SEQ,
                "global_batch_size": BATCH,
                "train_steps": STEPS,
                "log_samples": True,
            },
            "checkpoint": {"directory": str(tmp_path / "checkpoints")},
        }
    )


@pytest.fixture
def logs(tmp_path, run):
    """Steps 1-7, 6-9 and 10-12 by three generations of 2, 3 and 1 replicas; a list of lines for each file."""
    logs: dict[str, list[dict[str, object]]] = {}
    for generation, first, last in ((1, 1, 7), (2, 6, 9), (3, 10, 12)):
        for step in range(first, last + 1):
            ids = samples_of_step(step - 1, BATCH, NUM_SAMPLES, run.train.seed)
            for dp, part in enumerate(np.split(ids, np.cumsum(PARTS[generation])[:-1])):
                lines = logs.setdefault(f"g{generation:04d}-dp{dp:03d}.jsonl", [])
                lines.append({"step": step, "dp": dp, "samples": part.tolist()})
    return logs


def audit(tmp_path, run, logs, capsys) -> tuple[int, dict[str, object]]:
    (tmp_path / "samples").mkdir()
    for name, lines in logs.items():
        text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99, "d'  # a write that was cut short
        (tmp_path / "samples" / name).write_text(text)
    code = main(["--run-directory", str(tmp_path), "--history", json.dumps(HISTORY), "--run", run.model_dump_json()])
    return code, json.loads(capsys.readouterr().out)


def test_a_run_with_two_changes_of_layout_consumed_each_sample_once(tmp_path, run, logs, capsys):
    code, result = audit(tmp_path, run, logs, capsys)
    assert code == 0 and result["samples_each_once"] is True
    assert (result["steps"], result["samples"], result["problems"]) == (STEPS, STEPS * BATCH, [])
    assert result["rolled_back"] == 4  # steps 6 and 7 of generation 1, two replicas


def swap(lines, a, b):
    lines[a]["samples"], lines[b]["samples"] = lines[b]["samples"], lines[a]["samples"]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda logs: logs["g0002-dp001.jsonl"].pop(1), "step 7: missing"),
        (lambda logs: logs["g0001-dp000.jsonl"].append(dict(logs["g0001-dp000.jsonl"][2])), "step 3: replica 0"),
        (lambda logs: swap(logs["g0003-dp000.jsonl"], 0, 1), "step 10: missing"),
        (lambda logs: logs["g0001-dp001.jsonl"][0]["samples"].append(1), "step 1: missing [], not expected [1]"),
        (lambda logs: logs["g0003-dp000.jsonl"].append({"step": 13, "dp": 0, "samples": [1]}), "beyond the run"),
        (lambda logs: logs.pop("g0003-dp000.jsonl"), "step 12: missing"),
        # A generation that did not start where its plan says: the steps between were not run.
        (lambda logs: [logs[f"g0002-dp00{dp}.jsonl"].pop(0) for dp in range(3)], "step 6: missing"),
    ],
)
def test_whatever_is_missing_or_repeated_is_told(tmp_path, run, logs, capsys, damage, told):
    damage(logs)
    code, result = audit(tmp_path, run, logs, capsys)
    assert code == 1 and result["samples_each_once"] is False
    assert any(told in problem for problem in result["problems"]), result["problems"]


def test_questions_that_cannot_be_answered(tmp_path, run, capsys):
    quiet = run.model_copy(update={"train": run.train.model_copy(update={"log_samples": False})})
    for history, config in (("[]", quiet.model_dump_json()), ("{", run.model_dump_json()), ("[]", "{}")):
        assert main(["--run-directory", str(tmp_path), "--history", history, "--run", config]) == 2
    assert "log_samples" in capsys.readouterr().err
