"""The newest view, and which jobs a change concerns. The one mutable thing that reads and decisions share."""

from __future__ import annotations

import asyncio
import time

from controller.view import ClusterView, NodeVerdict, on_change, on_snapshot, on_verdict
from everstep.protocol.keys import Keys
from everstep.protocol.messages import JobState
from everstep.protocol.store import Change, Snapshot


class Board:
    """Holds the view; wakes whoever waits for it to change.

    ``take_concerned`` hands out the ids of jobs that want a look since the last call.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.view = ClusterView()
        self._concerned: set[str] = set()
        self._changed = asyncio.Event()
        self._waiters: set[asyncio.Event] = set()

    def apply(self, item: Snapshot | Change) -> None:
        """Take in what the watch told."""
        now = time.time()
        before = self.view
        if isinstance(item, Snapshot):
            self.view = on_snapshot(before, item, self._keys, now)
            self.concern_all()
        else:
            self.view = on_change(before, item, self._keys, now)
            self._concern(before, item.key)
        self._wake()

    def take_verdict(self, node: str, verdict: NodeVerdict) -> None:
        """Take in what an agent's endpoint said."""
        self.view = on_verdict(self.view, node, verdict)
        self.concern_all()
        self._wake()

    def concern_all(self) -> None:
        """Every job that has not ended wants a look."""
        self._concerned |= {job.id for job in self.view.jobs.values() if job.active}
        self._changed.set()

    def concern(self, job: str) -> None:
        """One job wants a look."""
        self._concerned.add(job)
        self._changed.set()

    async def take_concerned(self, timeout_s: float | None) -> set[str]:
        """Jobs that want a look; waits for some, at most ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return set()
        self._changed.clear()
        concerned, self._concerned = self._concerned, set()
        return concerned

    async def changed(self, timeout_s: float) -> bool:
        """Return True at the next change of the view, False when there is none for ``timeout_s``."""
        waiter = asyncio.Event()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)

    async def reached(self, revision: int, timeout_s: float) -> bool:
        """Wait until the view is at ``revision`` or newer; False when that takes longer than ``timeout_s``."""
        until = time.monotonic() + timeout_s
        while self.view.revision < revision:
            if not await self.changed(max(0.0, until - time.monotonic())):
                return False
        return True

    def _wake(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    def _concern(self, before: ClusterView, key: str) -> None:
        """Beats of running jobs concern nobody, so that a thousand nodes' beats cost next to nothing."""
        if key.startswith(self._keys.jobs):
            job_id, _, rest = key.removeprefix(self._keys.jobs).partition("/")
            self.concern(job_id)
            job = self.view.jobs.get(job_id)  # None: nothing about it can be read
            if rest.startswith("outcomes/") or (rest == "status" and job is not None and not job.active):
                self.concern_all()  # devices may have become free
        elif key.startswith(self._keys.nodes):
            self.concern_all()
        elif key.startswith(self._keys.beats):
            node = key.removeprefix(self._keys.beats)
            old, new = before.beats.get(node), self.view.beats.get(node)
            if new is None:
                return
            if old is None or old.value.incarnation != new.value.incarnation:
                self.concern_all()  # the first beat of a node makes it fit for work
            for job_id in {rank.job for rank in new.value.ranks}:
                known = self.view.jobs.get(job_id)
                if known is not None and known.status is not None and known.status.state is not JobState.RUNNING:
                    self.concern(job_id)
