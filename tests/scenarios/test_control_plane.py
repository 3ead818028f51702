"""The control plane may die at any time: training goes on, and the job is found as it was."""

from __future__ import annotations

import time

import httpx
import pytest

from everstep.protocol.messages import JobState
from tests.scenarios.cluster import kill, pids_of, wait_for

STEPS = 800


@pytest.fixture
def job(cluster):
    """A running job, some hundred steps from its end."""
    job = cluster.submit(cluster.spec("long", train_steps=STEPS))
    cluster.at_step(job, 15)
    yield job
    if not cluster.client.job(job).state.final:
        cluster.client.cancel(job)
        cluster.ended(job)


def test_a_killed_controller_adopts_the_running_job(cluster, job):
    before = cluster.client.job(job)
    cluster.local.kill_controller()
    seen = len(cluster.trail_lines(before, 1))
    wait_for(lambda: len(cluster.trail_lines(before, 1)) >= seen + 10, "training goes on without a controller")
    cluster.local.start_controller()
    wait_for(lambda: httpx.get(f"{cluster.local.url}/readyz").is_success, "the controller has its view")
    after = cluster.at_step(job, seen + 12)
    assert (after.generation, pids_of(after)) == (before.generation, pids_of(before))
    assert after.state is JobState.RUNNING
    # It is in charge again, too: a fault is answered.
    kill(pids_of(after)[1])
    cluster.at_step(job, 1, generation=2)


def test_ten_seconds_without_etcd_stop_nothing(cluster, job):
    before = cluster.client.job(job)
    kill(cluster.local.etcd.pid)
    cluster.local.etcd.process.wait()
    began, seen = time.monotonic(), len(cluster.trail_lines(before, 1))
    wait_for(lambda: time.monotonic() - began >= 10.0, "ten seconds pass")
    assert len(cluster.trail_lines(before, 1)) > seen + 10
    cluster.local.etcd.start()
    step = len(cluster.trail_lines(before, 1))
    after = cluster.at_step(job, step + 5)
    assert (after.generation, pids_of(after)) == (before.generation, pids_of(before))
    assert {node.node for node in cluster.client.nodes() if node.state == "ready"} == set(cluster.local.node_names)
    kill(pids_of(after)[0])
    cluster.at_step(job, 1, generation=2)
