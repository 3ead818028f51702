"""Views of jobs and nodes as the API tells them: pure functions of the cluster view."""

from __future__ import annotations

from typing import Literal

from controller.api.models import Generation, JobDetail, JobSummary, NodeView
from controller.restore import newest_checkpoint
from controller.view import ClusterView, Job
from everstep.protocol.link import Verdict
from everstep.protocol.messages import NodeRecord, Plan


def job_summary(view: ClusterView, job: Job) -> JobSummary:
    """One job in a line."""
    assert job.spec is not None and job.status is not None
    status, ranks = job.status, view.ranks_of(job)
    step = view.step_of(job)
    losses = [(rank.step, rank.loss) for rank in ranks if rank.loss is not None]
    shares = [rank.mfu for rank in ranks if rank.mfu is not None]
    speeds = [rank.tokens_per_s for rank in ranks if rank.tokens_per_s is not None]
    return JobSummary(
        id=job.id,
        name=status.name,
        state=status.state,
        reason=status.reason,
        generation=status.generation,
        restarts=status.restarts,
        submitted_at=status.submitted_at,
        started_at=status.started_at,
        ended_at=status.ended_at,
        cancel_requested=status.cancel_requested,
        layout=job.plan.layout if job.plan else None,
        num_ranks=job.plan.layout.world_size if job.plan else 0,
        step=step,
        train_steps=job.spec.train.train_steps,
        consumed_samples=step * job.spec.train.global_batch_size,
        loss=max(losses)[1] if losses else None,
        mfu=sum(shares) / len(shares) if shares else None,
        tokens_per_s=max(speeds) if speeds else None,
    )


def job_detail(view: ClusterView, job: Job, *, stale: bool) -> JobDetail:
    """Everything about one job but its events."""
    assert job.spec is not None and job.status is not None
    return JobDetail(
        **dict(job_summary(view, job)),
        spec=job.spec,
        plan=generation_of(job.plan) if job.plan else None,
        ranks=view.ranks_of(job),
        checkpoint=newest_checkpoint(
            job.checkpoints.values(), job.plan.history if job.plan else (), job.status.bad_checkpoints
        ),
        run_directory=run_directory(job),
        incident=job.status.incident,
        bad_checkpoints=job.status.bad_checkpoints,
        stale=stale,
    )


def run_directory(job: Job) -> str:
    """Where the job's checkpoints and metrics are."""
    assert job.spec is not None
    return f"{job.spec.checkpoint.directory}/{job.id}"


def generation_of(plan: Plan) -> Generation:
    """One generation."""
    return Generation(
        generation=plan.generation,
        layout=plan.layout,
        start_step=plan.restore.step if plan.restore else 0,
        restore=plan.restore,
        placements=plan.placements,
        created_at=plan.created_at,
        reason=plan.reason,
        stop=plan.stop,
    )


def node_views(view: ClusterView, now: float) -> list[NodeView]:
    """Registered nodes and those that left lately, by name."""
    records = {seen.value.node: seen.value for seen in view.departed.values()} | dict(view.nodes)
    return [_node_view(view, records[name], now) for name in sorted(records)]


def _node_view(view: ClusterView, record: NodeRecord, now: float) -> NodeView:
    verdict = view.verdict_of(record.node, record.incarnation)
    state: Literal["ready", "starting", "refusing", "gone"] = "ready"
    if record.node not in view.nodes:
        state = "gone"
    elif verdict is not None and verdict.verdict is Verdict.REFUSED:
        state = "refusing"
    elif not view.healthy(record.node):
        state = "starting"
    beat = view.beats.get(record.node)
    mine = beat if beat is not None and beat.value.incarnation == record.incarnation else None
    users = [
        job.id
        for job in view.jobs.values()
        if job.active and job.plan is not None and record.node in {p.node for p in job.plan.placements}
    ]
    return NodeView(
        node=record.node,
        state=state,
        incarnation=record.incarnation,
        host=record.host,
        port=record.port,
        pid=record.pid,
        domain=record.domain,
        devices=record.devices,
        versions=record.versions,
        started_at=record.started_at,
        beat_age_s=max(0.0, now - mine.at) if mine else None,
        jobs=sorted(users),
        ranks=list(mine.value.ranks) if mine and state != "gone" else [],
    )
