"""Who is to blame for the end of a rank, as its exception record says."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from engine.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointSaveError
from engine.failure import categorise
from engine.groups import CollectiveError
from engine.planning.corpus import CorpusError
from engine.planning.layout import Layout
from engine.planning.messages import EXIT_FAILURE, Failure, Meeting, from_rank
from engine.rank import main
from tests.harness import run_ranks
from tests.training import launch_of, tiny_run


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (CollectiveError("connection closed by peer"), "collective", "collective"),
        (CheckpointDamaged("shard", "cut off"), "checkpoint", "checkpoint"),
        (CheckpointSaveError("shard", "no space left on device", 28), "internal", "internal"),
        (CheckpointMismatch(["weight/x: not in the checkpoint"]), "user", "internal"),
        (CheckpointError("RuntimeError: on another rank"), "internal", "internal"),
        (CorpusError("data.path: an id outside the vocabulary"), "user", "user"),
        (FloatingPointError("the gradient norm of update 3 is nan"), "numerics", "numerics"),
        (MemoryError(), "memory", "memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "memory", "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory", "memory"),
        (PermissionError(13, "Permission denied", "/data"), "user", "internal"),
        (OSError(5, "Input/output error", "/data"), "internal", "internal"),
        (ValueError("train.lr: too large"), "user", "internal"),
        (RuntimeError("anything else"), "internal", "internal"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_category_follows_from_the_error_and_from_whether_a_step_was_done(error, before, after):
    assert categorise(error, stepped=False) == before
    assert categorise(error, stepped=True) == after


def _rank(rank, store, config, address):
    """Run a rank whose agent is a socket that only listens; its exit code and what it said last."""
    host, port = os.environ["EVERSTEP_TEST_STORE"].rsplit(":", 1)
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(address)
        agent.listen()
        launch = launch_of(config, Layout(), rank).model_copy(
            update={"agent_socket": address, "meeting": Meeting(host=host, port=int(port), prefix="failure")}
        )
        code = main(launch)
        line, _ = agent.accept()
        with line, line.makefile() as said:
            return code, said.readlines()[-1]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"corpus": "/nowhere/tokens"}, "data.path: /nowhere/tokens.idx does not exist"),
        ({"directory": "file/run"}, "Not a directory"),
        ({"model": {"num_layers": 4, "vocab_size": 40}}, "model.vocab_size is 40"),
    ],
    ids=["corpus", "run directory", "vocabulary"],
)
def test_what_the_user_got_wrong_is_recorded_as_that(settings, told, corpus, tmp_path):
    (tmp_path / "file").write_text("")
    settings = {"corpus": corpus, "directory": "run", "model": {}, **settings}
    config = tiny_run(settings["corpus"], tmp_path / settings["directory"], model=settings["model"])
    code, line = run_ranks(1, _rank, config, str(tmp_path / "agent"))[0]
    failure = from_rank.validate_json(line)
    assert code == EXIT_FAILURE
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert told in failure.message
