"""What an agent and its ranks say to each other: how a rank is launched, what it reports, how it is asked to stop.

Lines of JSON over a unix socket, one message a line, told apart by ``kind``. No torch here: the agent's side and the
controller read these too.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from engine.planning.config import RunConfig
from engine.planning.layout import Layout


class Message(BaseModel):
    """Base of all messages. Unknown fields are ignored so that an older reader understands a newer writer."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Meeting(Message):
    """Where the ranks of one generation meet: a store that is up already, and a prefix that carries the generation."""

    host: str
    port: int
    prefix: str


class GenerationStart(Message):
    """Step at which a generation began (the first step it ran). Readers ignore what older ones wrote from there on."""

    generation: int
    start_step: int


class RestorePoint(Message):
    """The checkpoint that a generation starts from. ``step`` counts completed steps."""

    step: int
    generation: int
    directory: str


class RankLaunch(Message):
    """All that one rank process needs to know. ``restore`` None means: initialise from the seed at step 0."""

    job: str
    generation: int
    rank: int
    layout: Layout
    run: RunConfig
    device: str = Field(description="'cpu' or 'cuda:N'")
    bind_address: str = "127.0.0.1"
    meeting: Meeting
    restore: RestorePoint | None = None
    history: tuple[GenerationStart, ...] = Field(default=(), description="older generations and this one, ascending")
    run_directory: str = Field(description="metrics and sample logs of the job go below it")
    agent_socket: str | None = Field(default=None, description="unix socket of the agent; None under torchrun")
    agent_silence_limit_s: float = Field(default=10.0, description="the rank ends itself when the agent says nothing")
    collective_timeout_s: float = 600.0
    peak_flops: float = Field(default=0.0, description="of this device, for MFU; 0 when unknown")
    num_threads: int = 1
    launched_at: float = Field(default=0.0, description="wall clock at which the agent asked for this process")

    @property
    def start_step(self) -> int:
        """Number of steps that are complete when this generation begins."""
        return self.restore.step if self.restore else 0


Phase = Literal["starting", "meeting", "building", "restoring", "compiling", "stepping", "saving", "stopping", "ended"]


class Hello(Message):
    """First line of a rank: who it is."""

    kind: Literal["hello"] = "hello"
    job: str
    generation: int
    rank: int
    pid: int


class Progress(Message):
    """Where the main loop is. Sent by the main loop alone, so a stuck loop looks stuck."""

    kind: Literal["progress"] = "progress"
    rank: int
    phase: Phase
    step: int = Field(description="completed steps")
    at: float = Field(description="wall clock, seconds since the epoch")
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    step_s: float | None = None
    tokens_per_s: float | None = Field(default=None, description="of the whole job")
    mfu: float | None = Field(default=None, description="convention 'full' of flops.py, per device")
    memory_bytes: int | None = None
    timings: dict[str, float] = Field(
        default_factory=dict,
        description="seconds of each start-up phase so far: start, meet, build, restore, first_step",
    )


class CheckpointCommitted(Message):
    """A checkpoint was published (sent by rank 0 after the manifest is in place)."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: int
    generation: int
    directory: str
    num_bytes: int
    seconds: float
    stall_s: float = Field(default=0.0, description="how long training stood still before the writing began")


class SaveFailed(Message):
    """A save failed on all ranks and left nothing behind (sent by rank 0). Training goes on for now."""

    kind: Literal["save_failed"] = "save_failed"
    step: int
    generation: int
    errno: int | None = Field(default=None, description="the system's error number; None when it was no system error")
    file: str | None = Field(default=None, description="what was being written, on whichever rank")
    reason: str
    failures_in_a_row: int


FailureCategory = Literal["user", "collective", "numerics", "checkpoint", "memory", "internal"]


class Failure(Message):
    """Exception record of a rank. ``user`` = the job itself is at fault (bad path, import error): no node is blamed."""

    kind: Literal["failure"] = "failure"
    rank: int
    generation: int
    category: FailureCategory
    error: str = Field(description="type of the exception")
    message: str
    traceback: str
    step: int | None = None
    at: float
    file: str | None = Field(default=None, description="the damaged file when category is checkpoint")


class Ended(Message):
    """Last line of a rank that ends well: the run is ``complete``, or it stopped because it was asked to."""

    kind: Literal["ended"] = "ended"
    rank: int
    step: int
    complete: bool


class Ping(Message):
    """The agent is alive."""

    kind: Literal["ping"] = "ping"


class StopRequest(Message):
    """Stop at the next step border, after saving when ``save`` is set. All ranks agree on the same step."""

    kind: Literal["stop"] = "stop"
    save: bool = True


AnyFromRank = Hello | Progress | CheckpointCommitted | SaveFailed | Failure | Ended
FromRank = Annotated[AnyFromRank, Field(discriminator="kind")]
FromAgent = Annotated[Ping | StopRequest, Field(discriminator="kind")]
from_rank: TypeAdapter[AnyFromRank] = TypeAdapter(FromRank)
from_agent: TypeAdapter[Ping | StopRequest] = TypeAdapter(FromAgent)

EXIT_OK = 0
EXIT_FAILURE = 10
"""Exit code of a rank that left an exception record."""
EXIT_AGENT_SILENT = 11
"""Exit code of a rank that ended itself because its agent went silent."""
