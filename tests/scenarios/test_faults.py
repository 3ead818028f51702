"""Faults of ranks and nodes: the job goes on in the best layout of what is left, exactly, and nothing old lives on."""

from __future__ import annotations

import signal

import pytest

from everstep.protocol.messages import JobState
from tests.scenarios.cluster import alive, kill, pids_of, tree, wait_for

SETTLED_S = 10.0
"""Generous bound on any recovery here; what it really takes is measured by benchmarks/recovery.py."""

GROWING = {"train_steps": 250, "global_batch_size": 12, "sequence_length": 16}
"""Twelve micro-batches, so that six ranks are better than four, and a run that lasts until the node is back."""


@pytest.fixture(scope="module")
def twin(cluster):
    """The job that nothing disturbs."""
    job = cluster.submit(cluster.spec("twin"))
    assert cluster.ended(job).state is JobState.SUCCEEDED
    return job


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_killed_rank_is_named_and_the_job_goes_on(cluster, twin, rank):
    """Rank 0, whose node hosts the meeting, is no different from any other."""
    job = cluster.submit(cluster.spec(f"rank-{rank}"))
    before = cluster.at_step(job, 34)
    at = kill(pids_of(before)[rank])
    after = cluster.at_step(job, 1, generation=2)
    assert cluster.first_step_at(after, 2) - at < SETTLED_S
    assert not any(alive(pid) for pid in pids_of(before).values())
    incident = cluster.event(job, "incident")
    assert f"rank {rank}" in incident.message and "signal 9" in incident.message and "cause unknown" in incident.message
    assert "memory" not in incident.message
    end = cluster.ended(job)
    assert (end.state, end.generation, end.restarts) == (JobState.SUCCEEDED, 2, 1)
    cluster.prove_exact(job, twin)


def test_two_ranks_that_die_together_are_both_named(cluster):
    job = cluster.submit(cluster.spec("pair"))
    pids = pids_of(cluster.at_step(job, 12))
    kill(pids[1])
    kill(pids[2])
    cluster.at_step(job, 1, generation=2)
    # The decision is made at the first death; the story of the recovery has both.
    faults = cluster.event(job, "recovered").data["faults"]
    assert len(faults) == 2 and all("killed by signal 9" in fault for fault in faults), faults
    assert {fault.split(" on ")[0] for fault in faults} == {"rank 1", "rank 2"}
    cluster.client.cancel(job)
    cluster.ended(job)


def test_a_killed_agent_leaves_nothing_and_its_node_is_taken_back(cluster, twin):
    """SIGKILL of the agent, not of its ranks: they end with it, the rest goes on, the node's return grows the job."""
    job = cluster.submit(cluster.spec("agent", **GROWING))
    before = cluster.at_step(job, 34)
    victim = before.plan.placements[1]
    processes = tree(cluster.local.pids[victim.node])
    at = cluster.local.kill_node(victim.node)
    after = cluster.at_step(job, 1, generation=2)
    assert cluster.first_step_at(after, 2) - at < SETTLED_S
    wait_for(lambda: not any(alive(pid) for pid in processes), "what the agent had started ends")
    assert victim.node not in {placement.node for placement in after.plan.placements}
    assert after.plan.layout.world_size <= 4
    cluster.local.start_node(victim.node)
    grown = cluster.at_step(job, 1, generation=3)
    assert grown.plan.layout.world_size > after.plan.layout.world_size
    assert grown.plan.start_step > after.plan.start_step
    recovered = cluster.event(job, "recovered", number=2)
    assert recovered.data["steps_lost"] == 0
    end = cluster.ended(job)
    assert (end.state, end.generation, end.restarts) == (JobState.SUCCEEDED, 3, 1)
    undisturbed = cluster.submit({**cluster.spec("agent-twin", **GROWING), "resources": {"ranks": 1}})
    cluster.ended(undisturbed)
    cluster.prove_exact(job, undisturbed)


def test_a_node_that_falls_silent_is_given_up_and_its_ghost_does_no_harm(cluster, twin):
    """SIGSTOP of the whole node: only the lease tells. Waking up, it finds that the job went on without it."""
    job = cluster.submit(cluster.spec("silent"))
    before = cluster.at_step(job, 34)
    victim = before.plan.placements[-1]
    ghosts = tree(cluster.local.pids[victim.node])
    for pid in ghosts:
        kill(pid, signal.SIGSTOP)
    after = cluster.at_step(job, 1, generation=2)
    assert victim.node not in {placement.node for placement in after.plan.placements}
    old = [pids_of(before)[rank] for rank in victim.ranks]
    for pid in reversed(ghosts):
        kill(pid, signal.SIGCONT)
    wait_for(lambda: not any(alive(pid) for pid in old), "the ghost's ranks end")
    assert cluster.ended(job).state is JobState.SUCCEEDED
    cluster.prove_exact(job, twin)
    cluster.all_ready()


def test_five_kills_in_quick_succession(cluster, twin):
    """Each generation meets at an address of its own; sockets in TIME_WAIT are in nobody's way."""
    job = cluster.submit(cluster.spec("five"))
    for generation in range(1, 6):
        detail = cluster.at_step(job, 1, generation=generation)
        kill(pids_of(detail)[generation % 2])
    end = cluster.ended(job)
    assert (end.state, end.generation, end.restarts) == (JobState.SUCCEEDED, 6, 5)
    for event in cluster.client.events(job):
        assert "in use" not in event.message
    cluster.prove_exact(job, twin)
