"""Plain ``torchrun``: train, stop, go on in another layout; what a user got wrong is a message and an exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys

import pytest
import yaml

from engine.planning.layout import Layout
from engine.torchrun import main
from tests.harness import run_ranks
from tests.training import metrics, tiny_run, train


def torchrun(config, path, processes, *arguments):
    """Run the engine under torchrun on this host; the finished process."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
            "--module", "engine.torchrun", "--config", str(path), *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip


def test_train_and_go_on_in_another_layout(corpus, tmp_path):
    """Two tensor ranks, then two stages from where those were: the losses are those of one undisturbed run."""
    settings = {"train_steps": 6, "decay_steps": 6}
    expected = [line["loss"] for line in train(tiny_run(corpus, tmp_path / "twin", **settings), Layout())]
    config = tiny_run(corpus, tmp_path / "run", **settings)
    short = config.model_copy(update={"train": config.train.model_copy(update={"train_steps": 3})})
    for start, run, layout in ((0, short, ["--tp", "2"]), (3, config, ["--pp", "2"])):
        done = torchrun(run, tmp_path / "run.yaml", 2, *layout)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        assert (said["step"], said["complete"]) == (start + 3, True)
    first, second = metrics(config, 1), metrics(config, 2)
    assert [line["layout"] for line in (first[0], second[0])] == ["TP2·PP1·DP1", "TP1·PP2·DP1"]
    assert [line["step"] for line in first + second] == [1, 2, 3, 4, 5, 6]
    for line, loss in zip(first + second, expected, strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-5)


def _main(rank, store, arguments):
    """Exit code and stderr of the program, in the environment that torchrun makes for the only process of a run."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    sys.argv = ["engine.torchrun", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    return code, errors.getvalue()


@pytest.mark.parametrize(
    ("change", "arguments", "told"),
    [
        ({"train": {"lr": -1.0}}, [], "run.yaml: train.lr: Input should be greater than 0"),
        ({"train": {"speed": 3}}, [], "run.yaml: train.speed: Extra inputs are not permitted"),
        ({}, ["--tp", "4"], "TP4·PP1·DP1 needs 4 ranks, torchrun started 1"),
        ({}, ["--tp", "0"], "argument --tp: 0 is no positive number"),
        ({"data": {"path": "/nowhere/tokens"}}, [], "data.path: /nowhere/tokens.idx does not exist"),
        ({"checkpoint": {"directory": "/proc/run"}}, [], "error: rank 0: FileNotFoundError: "),
    ],
    ids=["value", "field", "world", "degree", "corpus", "directory"],
)
def test_what_a_user_got_wrong_is_a_message_and_exit_code_2(change, arguments, told, corpus, tmp_path):
    config = tiny_run(corpus, tmp_path / "run").model_dump(mode="json")
    for part, values in change.items():
        config[part].update(values)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    code, errors = run_ranks(1, _main, ["--config", str(path), *arguments])[0]
    assert code == 2
    assert told in errors
