"""Jobs side by side, ends of every kind, and the user's own mistakes."""

from __future__ import annotations

import shutil
import socket
import struct
from pathlib import Path

import numpy as np
import pytest

from engine.data.order import samples_of_step
from engine.planning.corpus import check_corpus
from everstep.client import ApiError
from everstep.protocol.messages import JobState
from tests.scenarios.cluster import alive, pids_of, wait_for


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_two_jobs_at_once_while_somebody_holds_the_default_port(cluster):
    """29500 is where torch meets by default. Nothing here uses it, and two jobs do not get into each other's way."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 29500))
        holder.listen()
        jobs = []
        for name in ("first", "second"):
            spec = cluster.spec(name, train_steps=40)
            spec["resources"] = {"ranks": 2}
            jobs.append(cluster.submit(spec))
        assert [cluster.ended(job).state for job in jobs] == [JobState.SUCCEEDED] * 2
    cluster.prove_exact(jobs[0], jobs[1])


def test_cancel_and_success_leave_no_process_and_no_shared_memory(cluster):
    before = _shared_memory()
    job = cluster.submit(cluster.spec("cancelled", train_steps=5000))
    pids = pids_of(cluster.at_step(job, 5))
    cluster.client.cancel(job)
    assert cluster.ended(job).state is JobState.CANCELLED
    assert not any(alive(pid) for pid in pids.values())
    done = cluster.submit(cluster.spec("done", train_steps=30))
    pids = pids_of(cluster.at_step(done, 3))
    assert cluster.ended(done).state is JobState.SUCCEEDED
    wait_for(lambda: not any(alive(pid) for pid in pids.values()), "its ranks have ended")
    assert _shared_memory() <= before
    with pytest.raises(ApiError) as refused:
        cluster.client.cancel(done)
    assert refused.value.status == 409


def test_data_that_vanishes_before_the_start_fails_the_job_at_once_and_blames_no_node(cluster):
    """The path was good at submission and is bad when the ranks open it."""
    for ending in (".bin", ".idx"):
        shutil.copy(cluster.data / f"tokens{ending}", cluster.data / f"fleeting{ending}")
    blocker = cluster.submit(cluster.spec("blocker", train_steps=5000))
    cluster.at_step(blocker, 1)
    spec = cluster.spec("fleeting")
    spec["data"]["path"] = "fleeting"
    job = cluster.submit(spec)
    for ending in (".bin", ".idx"):
        (cluster.data / f"fleeting{ending}").unlink()
    cluster.client.cancel(blocker)
    end = cluster.ended(job)
    assert (end.state, end.generation, end.restarts) == (JobState.FAILED, 1, 0)
    assert "fleeting.idx does not exist" in end.reason
    incident = cluster.event(job, "failed")
    assert not any(node in incident.message for node in cluster.local.node_names)


def test_a_bad_token_met_at_step_seven_names_the_rank_the_step_and_the_sample(cluster):
    """Only one replica reads the bad sample; the ranks that are torn down after it are not called faults."""
    summary = check_corpus(str(cluster.data / "tokens"))
    sample = int(samples_of_step(6, 8, summary.num_samples(64), 1234)[4])  # step 7, second replica of two
    for ending in (".bin", ".idx"):
        shutil.copy(cluster.data / f"tokens{ending}", cluster.data / f"poisoned{ending}")
    with (cluster.data / "poisoned.bin").open("r+b") as file:
        file.seek((sample * 64 + 30) * np.dtype(summary.dtype).itemsize)
        file.write(struct.pack("<H", 60000))
    spec = cluster.spec("poisoned")
    spec["data"]["path"] = "poisoned"
    spec["layout"] = {"dp": 2}
    job = cluster.submit(spec)
    end = cluster.ended(job)
    assert (end.state, end.generation, end.restarts) == (JobState.FAILED, 1, 0)
    assert f"sample {sample}" in end.reason and "60000" in end.reason and "rank 1 after 6 steps" in end.reason
    assert "rank 0" not in end.reason
    (told,) = cluster.event(job, "incident").data["evidence"]
    assert (told["rank"], told["exit_code"], told["signal"], told["step"]) == (1, 10, None, 6)


BAD = {
    "unknown field": (lambda spec: spec["train"].update(learning_rate=1), "train.learning_rate", "unknown field"),
    "heads": (lambda spec: spec["model"].update(hidden_size=66), "model", "not divisible"),
    "missing data": (lambda spec: spec["data"].update(path="nowhere"), "data.path", "does not exist"),
    "outside the root": (lambda spec: spec["data"].update(path="/etc/passwd"), "data.path", ""),
    "batch": (lambda spec: spec["train"].update(micro_batch_size=3), "train", "multiple"),
    "layout": (lambda spec: spec.update(layout={"tp": 4}), "layout", "num_key_value_heads 2"),
    "replicas": (lambda spec: spec.update(layout={"dp": 16}), "layout", "micro-batches"),
    "world": (lambda spec: spec.update(layout={"tp": 2, "dp": 2}, resources={"ranks": 2}), "layout", "needs 4 ranks"),
    "too few wanted": (lambda spec: spec.update(resources={"ranks": 1, "min_ranks": 2}), "resources", "min_ranks"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_spec_is_refused_with_the_field_and_the_reason(cluster, name):
    change, field, reason = BAD[name]
    spec = cluster.spec("bad")
    change(spec)
    jobs = len(cluster.client.jobs())
    with pytest.raises(ApiError) as refused:
        cluster.client.submit(spec)
    assert refused.value.status == 422
    assert any(field in error.field and reason in error.message for error in refused.value.errors), refused.value.errors
    assert len(cluster.client.jobs()) == jobs
