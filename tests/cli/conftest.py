"""A real controller on a real etcd, without nodes, and the command run against it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from engine.data.indexed import CorpusWriter
from everstep.cli.local_cluster import ClusterSettings, LocalCluster
from everstep.cli.main import app


@dataclass(frozen=True)
class Answer:
    """What a command answered."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def service(tmp_path_factory):
    directory = tmp_path_factory.mktemp("service")
    settings = ClusterSettings(state=directory / "state", data_root=directory / "data", num_nodes=0)
    with LocalCluster(settings) as cluster:
        cluster.start()
        with CorpusWriter(settings.data_root / "corpus", np.uint16) as writer:
            writer.add_document(np.arange(5000) % 1003)
        yield cluster


@pytest.fixture
def everstep(service, monkeypatch):
    monkeypatch.setenv("EVERSTEP_URL", service.url)
    monkeypatch.setenv("COLUMNS", "200")
    return run_everstep


def run_everstep(*arguments: object) -> Answer:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def spec() -> dict[str, Any]:
    return {
        "name": "tiny",
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "ffn_hidden_size": 128,
            "vocab_size": 1003,
            "max_sequence_length": 32,
        },
        "data": {"path": "corpus"},
        "train": {"sequence_length": 32, "global_batch_size": 8, "train_steps": 40},
        "checkpoint": {"directory": "checkpoints"},
    }
