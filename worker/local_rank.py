"""One rank process as its agent knows it: what it last said, and how it ended."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field
from pathlib import Path

from engine.planning.messages import EXIT_AGENT_SILENT, AnyFromRank, Ended, Failure, Progress
from everstep.protocol.messages import RankExit, RankStatus
from worker.warm_client import Ending

_TAIL_LINES = 20
_TAIL_BYTES = 8192


@dataclass
class LocalRank:
    """Mutable record of one rank of one generation on this node. ``since`` is when its last progress line came."""

    job: str
    generation: int
    rank: int
    device: int
    log: Path
    rank_file: Path
    start_step: int
    since: float
    pid: int | None = None
    progress: Progress | None = None
    figures: Progress | None = None
    """The last line that carried a completed step's figures: they hold while the rank saves or stops."""
    failure: Failure | None = None
    ended: Ended | None = None
    exit: RankExit | None = None
    gone: bool = False
    forked: asyncio.Event = field(default_factory=asyncio.Event)
    line: asyncio.Task[None] | None = None

    @property
    def step(self) -> int:
        """Completed steps, as far as it said."""
        return self.progress.step if self.progress else self.start_step

    def take(self, message: AnyFromRank, now: float) -> bool:
        """Take note of a message; True when it is news that should go out at once."""
        if isinstance(message, Progress):
            before = self.progress
            self.progress = message
            self.since = now
            if message.loss is not None:
                self.figures = message
            first_step = message.step > self.start_step and (before is None or before.step <= self.start_step)
            return first_step or before is None or before.phase != message.phase
        if isinstance(message, Failure):
            self.failure = message
        elif isinstance(message, Ended):
            self.ended = message
        return False

    def status(self) -> RankStatus:
        """For the heartbeat."""
        assert self.pid is not None
        said, figures = self.progress, self.figures
        return RankStatus(
            job=self.job,
            generation=self.generation,
            rank=self.rank,
            device=self.device,
            pid=self.pid,
            phase=said.phase if said else "starting",
            step=self.step,
            since=self.since,
            loss=figures.loss if figures else None,
            grad_norm=figures.grad_norm if figures else None,
            lr=figures.lr if figures else None,
            step_s=figures.step_s if figures else None,
            tokens_per_s=figures.tokens_per_s if figures else None,
            mfu=figures.mfu if figures else None,
            memory_bytes=figures.memory_bytes if figures else None,
            timings=said.timings if said else {},
        )

    def record_end(self, ending: Ending, kill_began_at: float | None) -> None:
        """Tell its end apart. A failure that it reported before we began to kill is its own, whatever came after."""
        own_failure = self.failure is not None and (kill_began_at is None or self.failure.at < kill_began_at)
        stopped_by_us = ending.signalled and not own_failure
        complete = self.ended is not None and ending.exit_code == 0
        self.exit = RankExit(
            rank=self.rank,
            pid=ending.pid,
            exit_code=ending.exit_code,
            signal=ending.signal,
            stopped_by_us=stopped_by_us and not complete,
            complete=complete,
            failure=self.failure,
            step=self.step,
            at=ending.at,
            log_tail=tail(self.log),
            cause=cause_of(ending, self.failure, complete=complete, stopped_by_us=stopped_by_us),
        )

    def record_loss(self, pid: int, error: str, reason: str, now: float) -> None:
        """It ended, or never began, because of its agent's own trouble; nobody could look at how it ended."""
        failure = Failure(
            rank=self.rank,
            generation=self.generation,
            category="internal",
            error=error,
            message=reason,
            traceback="",
            step=self.step,
            at=now,
        )
        self.exit = RankExit(
            rank=self.rank,
            pid=pid,
            failure=self.failure or failure,
            step=self.step,
            at=now,
            log_tail=tail(self.log),
            cause=reason,
        )
        self.gone = True


def cause_of(ending: Ending, failure: Failure | None, *, complete: bool, stopped_by_us: bool) -> str:
    """The cause of an end in words, with nothing guessed: a signal of unknown sender is called that."""
    if complete:
        return "ended well"
    if stopped_by_us:
        return "stopped by its agent"
    if ending.exit_code == EXIT_AGENT_SILENT:
        return "ended itself because its agent was silent"
    if failure is not None:
        return f"{failure.error}: {failure.message}"
    if ending.signal is not None:
        return f"killed by signal {ending.signal} ({signal.strsignal(ending.signal)}), cause unknown"
    return f"ended with exit code {ending.exit_code} and left no record"


def tail(log: Path) -> str:
    """The last lines of a log; empty when there is none, a remark when it cannot be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"(the log cannot be read: {error})"
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
