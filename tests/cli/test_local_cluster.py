"""A local cluster from outside: it comes up, a killed node is gone and comes back, and no end leaves anything."""

from __future__ import annotations

import json
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from everstep.cli.local_cluster import ClusterSettings, LocalCluster
from everstep.cli.output import BadInput, OperationFailed
from everstep.client import Client
from tests.audit import processes_with


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


@pytest.fixture
def mark(tmp_path, monkeypatch) -> str:
    """All that the test starts carries it in its environment."""
    monkeypatch.setenv("EVERSTEP_TEST_MARK", str(tmp_path))
    return f"EVERSTEP_TEST_MARK={tmp_path}"


def test_a_node_is_killed_and_comes_back(tmp_path, mark):
    settings = ClusterSettings(state=tmp_path / "state", data_root=tmp_path / "data", num_nodes=2, ranks_per_node=1)
    with LocalCluster(settings) as cluster:
        cluster.start()
        assert stat.S_IMODE((tmp_path / "state" / "token").stat().st_mode) == 0o600
        with Client(cluster.url) as client:

            def states() -> dict[str, str]:
                return {node.node: node.state for node in client.nodes()}

            wait_for(lambda: states() == {"node-0": "ready", "node-1": "ready"})
            before = cluster.pids
            cluster.kill_node("node-1")
            assert cluster.ended_nodes() == ["node-1"]
            wait_for(lambda: states()["node-1"] in ("refusing", "gone"))
            cluster.check()
            cluster.start_node("node-1")
            wait_for(lambda: states() == {"node-0": "ready", "node-1": "ready"})
            after = cluster.pids
            assert before.pop("node-1") != after.pop("node-1")
            assert before == after
        with LocalCluster(settings) as second, pytest.raises(BadInput, match="another cluster runs"):
            second.start()
        assert len(processes_with(mark)) > len(before)
    assert processes_with(mark) == {}
    assert cluster.pids == {}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_end_of_the_command_leaves_a_process(tmp_path, mark, how):
    command = [sys.executable, "-m", "everstep.cli", "up", "--data-root", str(tmp_path), "--port", "0", "--json"]
    command += ["--nodes", "1", "--ranks-per-node", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60.0)[0], "the cluster did not come up"
        pids = json.loads(process.stdout.readline())["pids"]
        assert set(pids) == {"etcd", "controller", "node-0"}
        assert set(pids.values()) <= set(processes_with(mark))
        process.send_signal(how)
        assert process.wait(30.0) == (-signal.SIGKILL if how == signal.SIGKILL else 0)
    wait_for(lambda: processes_with(mark) == {})


def test_a_port_in_use_is_told(service, tmp_path, mark):
    port = int(service.url.rpartition(":")[2])
    settings = ClusterSettings(state=tmp_path / "state", data_root=tmp_path / "data", num_nodes=0, port=port)
    with LocalCluster(settings) as cluster, pytest.raises(OperationFailed, match=r"controller ended[\s\S]*in use"):
        cluster.start()
    assert processes_with(mark) == {}
