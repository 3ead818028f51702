"""What the API answers. ``stale`` says that etcd is away and the answer is the last thing heard."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from engine.planning.layout import Layout
from engine.planning.messages import RestorePoint
from everstep.protocol.messages import (
    CheckpointRecord,
    Device,
    Event,
    JobSpec,
    JobState,
    Placement,
    RankStatus,
)


class JobSummary(BaseModel):
    """One job in a line."""

    id: str
    name: str
    state: JobState
    reason: str
    generation: int
    restarts: int
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    cancel_requested: bool
    layout: Layout | None = Field(description="of the current generation")
    num_ranks: int
    step: int = Field(description="completed steps, as far as heartbeats told")
    train_steps: int
    consumed_samples: int = Field(description="step x global batch: samples that the surviving history consumed")
    loss: float | None
    mfu: float | None = Field(description="mean of the ranks that told")
    tokens_per_s: float | None


class Generation(BaseModel):
    """One generation of a job."""

    generation: int
    layout: Layout
    start_step: int = Field(description="steps that were complete when it began")
    restore: RestorePoint | None
    placements: tuple[Placement, ...]
    created_at: float
    reason: str
    stop: Literal["", "save", "kill"]


class JobDetail(JobSummary):
    """Everything about one job but its events."""

    spec: JobSpec
    plan: Generation | None
    ranks: list[RankStatus]
    checkpoint: CheckpointRecord | None = Field(description="the newest that counts")
    run_directory: str
    incident: dict[str, Any] | None
    bad_checkpoints: tuple[str, ...]
    stale: bool


class JobList(BaseModel):
    """Jobs, newest first."""

    jobs: list[JobSummary]
    stale: bool


class EventList(BaseModel):
    """Events of a job, oldest first."""

    events: list[Event]
    stale: bool


class GenerationList(BaseModel):
    """Generations of a job, oldest first."""

    generations: list[Generation]
    stale: bool


class LossTrail(BaseModel):
    """Lines of the metrics files that belong to the surviving history, by step."""

    steps: list[dict[str, Any]]


class NodeView(BaseModel):
    """One node. ``beat_age_s``: seconds since its newest heartbeat was heard."""

    node: str
    state: Literal["ready", "starting", "refusing", "gone"]
    incarnation: str
    host: str
    port: int
    pid: int
    domain: str
    devices: tuple[Device, ...]
    versions: dict[str, str]
    started_at: float
    beat_age_s: float | None
    jobs: list[str] = Field(description="active jobs whose plan uses it")
    ranks: list[RankStatus]


class NodeList(BaseModel):
    """Nodes by name, those that left lately included."""

    nodes: list[NodeView]
    stale: bool
