"""What controller, agents and clients say to each other through etcd and REST.

Unknown fields are ignored on reading, so older and newer programs understand each other; what users write
(``JobSpec``) is strict instead. Times are wall-clock seconds since the epoch, durations are seconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from engine.planning.config import CheckpointConfig, CorpusConfig, ModelConfig, RunConfig, Settings, TrainConfig
from engine.planning.layout import Layout, illegal_reasons
from engine.planning.messages import Failure, GenerationStart, Meeting, Message, Phase, RestorePoint

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]


class ResourceConfig(Settings):
    """How many ranks a job wants and the fewest it goes on with."""

    ranks: int | None = Field(default=None, ge=1, description="wanted; every healthy rank when not given")
    min_ranks: int = Field(default=1, ge=1, description="below this the job waits instead of going on")
    max_restarts: int = Field(default=10, ge=0, description="faults (not planned changes) before the job fails")


class JobSpec(Settings):
    """A job as a user submits it (YAML or JSON). ``layout: auto`` lets the planner choose."""

    name: Name
    model: ModelConfig
    data: CorpusConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    layout: Literal["auto"] | Layout = "auto"
    resources: ResourceConfig = ResourceConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.run_config()
        if isinstance(self.layout, Layout):
            reasons = illegal_reasons(self.layout, self.model, self.train, num_ranks=self.resources.ranks)
            if reasons:
                raise ValueError("layout: " + "; ".join(reasons))
        if self.resources.ranks is not None and self.resources.min_ranks > self.resources.ranks:
            raise ValueError(
                f"resources.min_ranks {self.resources.min_ranks} is above resources.ranks {self.resources.ranks}"
            )
        return self

    def run_config(self) -> RunConfig:
        """The part that the engine needs."""
        return RunConfig(model=self.model, data=self.data, train=self.train, checkpoint=self.checkpoint)


class JobState(StrEnum):
    """States of a job; the last three are final."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    PAUSED = "PAUSED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def final(self) -> bool:
        """Whether the job has ended for good."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Device(Message):
    """One device of a node: one rank runs on it."""

    kind: Literal["cpu", "cuda"]
    index: int
    memory_bytes: int
    peak_flops: float = Field(description="measured by a short GEMM on a CPU, the data sheet's figure on a GPU")
    name: str = ""


class NodeRecord(Message):
    """A node as its agent registers it, under the agent's lease. ``incarnation`` is new at every agent start."""

    node: Name
    incarnation: str
    host: str = Field(description="address that other nodes reach this one at")
    port: int = Field(description="the agent's authenticated endpoint")
    meeting_port: int = Field(description="the store in which generations meet whose rank 0 is here")
    devices: tuple[Device, ...]
    domain: str = Field(default="default", description="failure domain: rack, host, power")
    versions: dict[str, str] = Field(default_factory=dict)
    pid: int
    started_at: float


class RankStatus(Message):
    """One rank as its agent sees it."""

    job: str
    generation: int
    rank: int
    device: int
    pid: int
    phase: Phase
    step: int
    since: float = Field(description="when the last progress line came")
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    timings: dict[str, float] = Field(default_factory=dict)


class Heartbeat(Message):
    """One key a node, lease-bound: all its ranks."""

    node: Name
    incarnation: str
    sequence: int
    at: float
    ranks: tuple[RankStatus, ...] = ()


class Placement(Message):
    """The ranks of a generation that one node runs: rank ``ranks[i]`` on device ``devices[i]``."""

    node: Name
    incarnation: str
    host: str
    ranks: tuple[int, ...]
    devices: tuple[int, ...]


class Plan(Message):
    """One generation of a job, as agents carry it out. ``stop`` asks the running generation to end (see StopMode)."""

    job: str
    generation: int
    layout: Layout
    placements: tuple[Placement, ...]
    meeting: Meeting
    restore: RestorePoint | None
    history: tuple[GenerationStart, ...]
    run: RunConfig
    run_directory: str
    reason: str
    created_at: float
    stop: Literal["", "save", "kill"] = Field(
        default="", description="'save': save at the next step border, then end; 'kill': end now"
    )


class RankExit(Message):
    """How one rank ended, told apart: exception record, exit code, signal, or stopped by its agent."""

    rank: int
    pid: int
    exit_code: int | None = None
    signal: int | None = None
    stopped_by_us: bool = Field(default=False, description="the agent ended it: not a fault of its own")
    complete: bool = Field(default=False, description="it ended well: the run is complete, or it stopped when asked")
    failure: Failure | None = None
    step: int = 0
    at: float
    log_tail: str = ""
    cause: str = Field(default="", description="in words, nothing guessed: 'killed by signal 9, cause unknown'")

    @property
    def is_fault(self) -> bool:
        """Whether this end was a fault of the rank (as against a good end, or being stopped by its agent)."""
        return not self.stopped_by_us and not self.complete


class NodeOutcome(Message):
    """How a generation's ranks on one node ended so far; kept (not lease-bound), written at each end.

    ``all_gone`` is proven: every process that the agent started for this generation has been reaped.
    """

    job: str
    generation: int
    node: Name
    incarnation: str
    exits: tuple[RankExit, ...]
    all_gone: bool
    run_complete: bool = Field(default=False, description="rank 0 reported that the last step is done and saved")
    stop_began_at: float | None = None
    stop_ended_at: float | None = None
    started_at: float | None = Field(default=None, description="when this generation's ranks were forked")


class CheckpointRecord(Message):
    """A published checkpoint, indexed by the agent of rank 0."""

    job: str
    step: int
    generation: int
    directory: str
    num_bytes: int
    seconds: float
    stall_s: float = Field(default=0.0, description="how long training stood still before the writing began")
    at: float


class JobStatus(Message):
    """Where a job stands. Written by the controller alone, always conditional on leadership and generation."""

    job: str
    name: Name
    state: JobState
    generation: int = Field(default=0, description="0 = never placed")
    reason: str = ""
    submitted_at: float
    started_at: float | None = None
    ended_at: float | None = None
    restarts: int = Field(default=0, description="faults so far; planned changes do not count")
    cancel_requested: bool = False
    changed_at: float
    drain_for: Literal["", "grow"] = Field(default="", description="why the running generation is asked to stop")
    incident: dict[str, Any] | None = Field(default=None, description="the fault being recovered from")
    bad_checkpoints: tuple[str, ...] = ()
    trouble: str = Field(default="", description="the controller's own error over this job; nobody queues behind it")


class Event(Message):
    """Something that happened to a job or a node. ``data`` holds the figures."""

    at: float
    kind: str
    job: str = ""
    generation: int = 0
    message: str
    data: dict[str, Any] = Field(default_factory=dict)
