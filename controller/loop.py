"""Observe, detect, decide, plan: one task that looks at every job that a change concerns and writes what follows."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from controller.board import Board
from controller.decide import Policy
from controller.disk import DiskReader
from controller.leader import Leadership, NotLeader
from controller.metrics import Metrics
from controller.reconcile import Action, reconcile
from controller.trouble import Trouble, tell_failure, tell_over
from controller.view import Job
from everstep.protocol.keys import Keys
from everstep.protocol.store import Put, StoreUnavailable, Unchanged

_log = logging.getLogger(__name__)

OWN_WRITE_S = 2.0
STORE_RETRY_S = 0.5


class Loop:
    """Acts for this controller while it leads."""

    def __init__(self, board: Board, leadership: Leadership, keys: Keys, policy: Policy, metrics: Metrics) -> None:
        self._board = board
        self._leadership = leadership
        self._keys = keys
        self._policy = policy
        self._metrics = metrics
        self._look_again: dict[str, float] = {}
        self._trouble = Trouble()
        self._disk = DiskReader()

    async def run(self) -> None:
        """For ever. A job is looked at when something about it changes, or at the time its last look asked for."""
        while True:
            now = time.time()
            next_look = min(self._look_again.values(), default=None)
            concerned = await self._board.take_concerned(None if next_look is None else max(0.0, next_look - now))
            now = time.time()
            due = {job for job, at in self._look_again.items() if at <= now}
            if not self._leadership.held or self._board.view.synced_at is None:
                self._look_again.clear()
                continue  # whoever wins leadership looks at everything
            for job_id in sorted(concerned | due, key=self._order):
                self._look_again.pop(job_id, None)
                job = self._board.view.jobs.get(job_id)
                if job is None or not job.active:
                    self._trouble.over(job_id)
                elif (not_before := self._trouble.not_before(job_id)) > time.time():
                    self._look_again[job_id] = not_before
                else:
                    await self._look_safely(job)

    def _order(self, job_id: str) -> tuple[float, str]:
        """Earlier jobs choose their devices first."""
        job = self._board.view.jobs.get(job_id)
        return (job.status.submitted_at if job is not None and job.status is not None else 0.0, job_id)

    async def _look_safely(self, job: Job) -> None:
        """What goes wrong over one job must not end the others."""
        try:
            await self._look(job)
        except Exception as error:
            _log.exception("job %s: the look at it failed", job.id)
            self._metrics.job_failed()
            again_at = self._trouble.failed(job.id, time.time())
            try:
                await self._carry_out(job, tell_failure(job, error, time.time()))
            except Exception:
                _log.exception("job %s: nor can that be told", job.id)
            self._look_again[job.id] = again_at
        else:
            self._trouble.over(job.id)

    async def _look(self, job: Job) -> None:
        now = time.time()
        action = reconcile(self._board.view, job, now, self._policy)
        if action.look_at_disk:
            on_disk = await self._disk.look(job)
            newest = self._board.view.jobs.get(job.id)
            if newest is None or not newest.active:
                return
            job, now = replace(newest, on_disk=on_disk), time.time()
            action = reconcile(self._board.view, job, now, self._policy)
        action = tell_over(job, action, now)
        if action.look_again_at is not None:
            self._look_again[job.id] = action.look_again_at
        await self._carry_out(job, action)

    async def _carry_out(self, job: Job, action: Action) -> None:
        """Write what the action says, then wait until the view shows it. Raises StoreError when etcd refuses it."""
        now = time.time()
        if action.status is None:
            return
        try:
            revision = await self._write(job, action)
        except NotLeader:
            return
        except StoreUnavailable as error:
            _log.warning("job %s: not written, etcd is away: %s", job.id, error)
            self._look_again[job.id] = now + STORE_RETRY_S
            return
        if revision is None:
            # Somebody else wrote first; the watch brings that and with it the next look.
            _log.info("job %s: overtaken by another write", job.id)
            self._look_again[job.id] = now + STORE_RETRY_S
            return
        for event in action.events:
            # What ranks said may hold line breaks; none of it shall look like a line of ours.
            _log.info("job %s: %s", job.id, "\\n".join(event.message.splitlines()))
            self._metrics.count(event)
        if not await self._board.reached(revision, OWN_WRITE_S):
            self._look_again[job.id] = time.time() + STORE_RETRY_S

    async def _write(self, job: Job, action: Action) -> int | None:
        """One transaction: only if this controller leads and the job is as it was when this was decided."""
        assert action.status is not None
        conditions = [Unchanged(self._keys.status(job.id), job.status_revision)]
        puts = [Put(self._keys.status(job.id), action.status.model_dump_json().encode())]
        if action.plan is not None:
            value = action.plan.model_dump_json().encode()
            puts.append(Put(self._keys.plan(job.id), value))
            puts.append(Put(self._keys.plan_of(job.id, action.plan.generation), value))
        for number, event in enumerate(action.events):
            puts.append(Put(self._keys.event(job.id, event.at, number), event.model_dump_json().encode()))
        return await self._leadership.transaction(conditions, puts)
