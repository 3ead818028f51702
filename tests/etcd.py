"""Real etcd servers for tests: one for all that leave it in peace, and one's own for those that break it."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.protocol.etcd_server import PrivateEtcd
from everstep.protocol.store import StoreSettings


@pytest.fixture(scope="session")
def private_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateEtcd]:
    """One etcd for the whole session. Do not stop, freeze or compact it, and write below a root of your own."""
    server = PrivateEtcd(tmp_path_factory.mktemp("etcd") / "data")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def breakable_etcd(tmp_path: Path) -> Iterator[PrivateEtcd]:
    """An etcd of one's own (ready in about 0.4 s), to kill, freeze and compact."""
    server = PrivateEtcd(tmp_path / "etcd")
    server.start()
    yield server
    server.stop(grace_s=0.2)


@pytest.fixture
def store_settings(private_etcd: PrivateEtcd) -> StoreSettings:
    """Settings for the session's etcd with a root that nobody else uses."""
    return StoreSettings(endpoints=(private_etcd.endpoint,), root=f"/test-{uuid.uuid4().hex[:12]}")


def freeze(process: subprocess.Popen[bytes]) -> None:
    """SIGSTOP, and wait until every thread has stopped; ``process.send_signal(signal.SIGCONT)`` thaws it."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
