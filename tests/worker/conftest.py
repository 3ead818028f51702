from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.protocol.etcd_server import PrivateEtcd
from tests.worker.cluster import AgentProcess


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateEtcd]:
    server = PrivateEtcd(tmp_path_factory.mktemp("etcd") / "data")
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def agent(etcd: PrivateEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """One agent for all tests that leave it alive."""
    process = AgentProcess("shared", etcd.endpoint, tmp_path_factory.mktemp("shared"))
    process.start()
    process.wait_ready()
    yield process
    process.stop()


@pytest.fixture
def other_agent(etcd: PrivateEtcd, tmp_path: Path) -> Iterator[AgentProcess]:
    """An agent of this test's own, not started yet."""
    process = AgentProcess("other", etcd.endpoint, tmp_path)
    yield process
    if hasattr(process, "process"):
        process.stop()
