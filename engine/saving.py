"""When a save happens and what follows from its outcome: the training loop's side of checkpoints.

A save is a copy in host memory, for which training stands still, and then the writing and publishing of that copy by
one background thread a rank. These threads talk to each other over a process group of their own, so their collectives
never mix with those of training. One save is under way at a time: when the next one comes too early it waits.

Every rank learns the same outcome of every save. The moment differs, so the ranks agree at a step border
(``failed``, summed over the ranks) before they stop for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.agent_link import AgentLink
from engine.checkpoint.background import BackgroundWorker
from engine.checkpoint.catalog import prune
from engine.checkpoint.errors import CheckpointError, CheckpointSaveError, CheckpointSuperseded
from engine.checkpoint.fence import newest_claim
from engine.checkpoint.host_copy import HostCopy
from engine.checkpoint.pieces import Piece
from engine.checkpoint.save import save_checkpoint
from engine.groups import Group
from engine.planning.messages import CheckpointCommitted, RankLaunch, SaveFailed

_LONGEST_REASON = 1000
"""Characters. What boxes a manifest lacks can be a long list, and the reason becomes an event."""


class CheckpointSaver:
    """Saves the state of one rank below ``directory``; ``pieces`` are views of it, valid for the whole generation.

    ``group`` has all ranks and its collectives are used by the saver alone.
    """

    def __init__(
        self, launch: RankLaunch, directory: Path, group: Group, link: AgentLink, pieces: Sequence[Piece]
    ) -> None:
        self._launch, self._directory, self._group, self._link = launch, directory, group, link
        self._settings = launch.run.checkpoint
        self._pieces = pieces
        self._worker = BackgroundWorker("checkpoint-writer")
        self._copy: HostCopy | None = None
        self._copies = self._settings.asynchronous
        self._failures: list[CheckpointError] = []
        """Of the failed saves since the last good one; written by the background thread."""

    @property
    def failed(self) -> bool:
        """Whether this rank knows by now that the generation has to end: too many failed saves, or a fatal error."""
        return self._worker.error is not None or len(self._failures) >= self._settings.max_failures

    def save(self, step: int, extra: Mapping[str, Any]) -> None:
        """Take the state after ``step`` completed steps; every rank calls this at the same step.

        ``extra`` goes into the manifest: what the state needs beside the pieces, the same on every rank.
        Returns when the state may change again. Waits for the save before this one, and raises as ``raise_failure``
        does when that was one failure too many.
        """
        began = time.monotonic()
        self._worker.wait()
        if self.failed:
            self.raise_failure()
        pieces = self._take() if self._copies else None
        stall_s = time.monotonic() - began
        self._worker.start(lambda: self._write(step, self._pieces if pieces is None else pieces, extra, stall_s))
        if pieces is None:
            self._worker.wait()

    def save_and_wait(self, step: int, extra: Mapping[str, Any]) -> None:
        """``save``, and wait until it is published. Raises the save's own error when it failed."""
        self.save(step, extra)
        self._worker.wait()
        if self._failures:
            raise self._failures[-1]

    def wait(self) -> None:
        """Wait for the save under way; one that fails is counted, what is fatal raised."""
        self._worker.wait()

    def raise_failure(self) -> None:
        """End the generation: raise why, now that at least one rank has ``failed``. Every rank calls this together."""
        self._worker.wait()
        if self._failures:
            last = self._failures[-1]
            last.add_note(f"{len(self._failures)} saves failed in a row")
            raise last
        elsewhere = CheckpointError("a save went wrong on another rank")
        elsewhere.elsewhere = True
        raise elsewhere

    def close(self) -> None:
        """End the thread and give the memory back, after the save under way. Raises as ``wait`` does."""
        try:
            self._worker.close()
        finally:
            if self._copy is not None:
                self._copy.close()
                self._copy = None

    def _take(self) -> Sequence[Piece] | None:
        """The copy; None when there is no room for one: then this rank holds still until its part is written.

        The others need not know, for what a save does is the same either way.
        """
        if self._copy is None:
            try:
                self._copy = HostCopy(self._pieces)
            except MemoryError as error:
                print(f"checkpoint.asynchronous: {error}; training waits while state is saved", file=sys.stderr)
                self._copies = False
                return None
        return self._copy.take()

    def _write(self, step: int, pieces: Sequence[Piece], extra: Mapping[str, Any], stall_s: float) -> None:
        """In the background thread. A failed save is counted and told of; everything else that goes wrong is fatal."""
        launch = self._launch
        try:
            saved = save_checkpoint(
                pieces,
                self._directory,
                self._group,
                job=launch.job,
                generation=launch.generation,
                step=step,
                run=launch.run,
                layout=launch.layout,
                extra=extra,
                still_current=self.is_current,
            )
        except CheckpointSuperseded:
            raise
        except CheckpointError as error:
            self._failures.append(error)
            if launch.rank == 0:
                self._link.send(_told(error, step, launch.generation, len(self._failures)))
            return
        self._failures.clear()
        if launch.rank != 0:
            return
        self._link.send(
            CheckpointCommitted(
                step=step,
                generation=launch.generation,
                directory=str(saved.directory),
                num_bytes=saved.num_bytes,
                seconds=saved.seconds,
                stall_s=stall_s,
            )
        )
        if self.is_current():
            prune(
                self._directory,
                keep=self._settings.keep,
                history=launch.history,
                protected_steps=(launch.start_step,),
            )

    def is_current(self) -> bool:
        """Whether no newer generation claimed the checkpoints: a ghost must not publish, and least of all delete."""
        return newest_claim(self._directory) <= self._launch.generation


def _told(error: CheckpointError, step: int, generation: int, failures: int) -> SaveFailed:
    """The failure for the agent. An error that is none of the system's has no number, and may have no file."""
    known = error if isinstance(error, CheckpointSaveError) else None
    return SaveFailed(
        step=step,
        generation=generation,
        errno=known.errno if known else None,
        file=known.file if known else None,
        reason=(known.reason if known else str(error))[:_LONGEST_REASON],
        failures_in_a_row=failures,
    )
