"""Plans into ranks: for each job the newest generation counts, and it starts only when nothing is left of the older."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import structlog
from pydantic import ValidationError

from everstep.protocol.keys import Keys
from everstep.protocol.messages import JobStatus, Placement, Plan
from everstep.protocol.store import Change, KeyValue, Snapshot
from worker.generation import LocalGeneration, Site, tell_never_started
from worker.warm_client import Ending, WarmParentHandle

log = structlog.get_logger()

WarmParentSource = Callable[[], Awaitable[WarmParentHandle]]
Record = TypeVar("Record", Plan, JobStatus)


class JobKeeper:
    """One job on this node. ``wanted`` is the newest plan seen; older ones are refused (fencing)."""

    def __init__(self, job: str, site: Site, warm_parent: WarmParentSource) -> None:
        self._job = job
        self._site = site
        self._warm_parent = warm_parent
        self._wanted: Plan | None = None
        self._dropped = False
        self._changed = asyncio.Event()
        self.current: LocalGeneration | None = None

    def want(self, plan: Plan) -> None:
        """A plan was seen."""
        if self._wanted is not None and plan.generation < self._wanted.generation:
            log.warning("an older plan is ignored", job=self._job, generation=plan.generation)
            return
        self._wanted = plan
        self._changed.set()

    def drop(self) -> None:
        """The job is over, or its plan was deleted: nothing of it shall run here."""
        self._dropped = True
        self._changed.set()

    async def run(self) -> None:
        """Bring what runs in line with what is wanted, until the job is dropped and nothing is left of it."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._dropped:
                await self._end_current()
                self._tell_what_never_started()
                return
            await self._carry_out()

    async def shut_down(self) -> None:
        """End the ranks: SIGTERM, then SIGKILL. ``run`` must not be running any more."""
        if self.current is not None and not self.current.all_gone:
            await self.current.terminate()

    async def _carry_out(self) -> None:
        plan = self._wanted
        assert plan is not None
        if self.current is not None and self.current.plan.generation == plan.generation:
            if plan.stop == "save":
                self.current.request_save()
            elif plan.stop == "kill":
                self.current.begin_terminate()
            return
        await self._end_current()
        placement = placement_of(plan, self._site)
        if placement is None:
            return
        if plan.stop:
            tell_never_started(plan, self._site)
            return
        warm = await self._warm_parent()
        if self._dropped or self._wanted is not plan:
            # Something newer came meanwhile; the loop looks at it next.
            return
        self.current = LocalGeneration(plan, placement, self._site, warm)
        await self.current.start()

    def _tell_what_never_started(self) -> None:
        """The job ended before its plan came to anything here: whoever waits for the devices is to know."""
        plan = self._wanted
        assert plan is not None
        begun = self.current is not None and self.current.plan.generation == plan.generation
        if not begun and placement_of(plan, self._site) is not None:
            tell_never_started(plan, self._site)

    async def _end_current(self) -> None:
        if self.current is not None and not self.current.all_gone:
            self.current.kill()
            await self.current.wait_gone()


def placement_of(plan: Plan, site: Site) -> Placement | None:
    """The part of ``plan`` that this life of this node's agent is to run; None when there is none."""
    ours = [item for item in plan.placements if item.node == site.node]
    placement = next((item for item in ours if item.incarnation == site.incarnation), None)
    if placement is None:
        if ours:
            log.warning("a plan names another incarnation of this node", job=plan.job, generation=plan.generation)
        return None
    here = range(len(site.devices))
    assert all(index in here for index in placement.devices), f"{placement} names devices that are not here"
    return placement


class Jobs:
    """Every job that this node has to do with, fed by a watch of the jobs in etcd."""

    def __init__(self, keys: Keys, site: Site, warm_parent: WarmParentSource, tasks: asyncio.TaskGroup) -> None:
        self._keys = keys
        self._site = site
        self._warm_parent = warm_parent
        self._tasks = tasks
        self._keepers: dict[str, JobKeeper] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._over: set[str] = set()

    @property
    def generations(self) -> list[LocalGeneration]:
        """What runs here, or ran here last, one a job."""
        return [keeper.current for keeper in self._keepers.values() if keeper.current is not None]

    def ended(self, ending: Ending) -> None:
        """A process that the warm parent forked has ended."""
        for generation in self.generations:
            if (rank := generation.find(ending.pid)) is not None:
                generation.rank_ended(rank, ending)

    def gone(self, pid: int) -> None:
        """Nothing is left of a rank's session."""
        for generation in self.generations:
            if (rank := generation.find(pid)) is not None:
                generation.rank_gone(rank)

    def lost(self, reason: str) -> None:
        """The warm parent has ended and with it every rank."""
        for generation in self.generations:
            if not generation.all_gone:
                generation.lost(reason)

    async def follow(self, changes: AsyncIterator[Snapshot | Change]) -> None:
        """Act on plans as they come, for ever."""
        async for item in changes:
            if isinstance(item, Snapshot):
                self._take_all(item)
            else:
                self._take(item.key, item.item)

    async def shut_down(self) -> None:
        """Stop acting on plans and end all ranks."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await asyncio.gather(*(keeper.shut_down() for keeper in self._keepers.values()))

    def _take_all(self, snapshot: Snapshot) -> None:
        there = {item.key for item in snapshot.items}
        for job in list(self._keepers):
            if self._keys.plan(job) not in there:
                self._drop(job)
        # States before plans: the plan of a job that is over must not start anything.
        for item in sorted(snapshot.items, key=lambda item: not item.key.endswith("/status")):
            self._take(item.key, item)
        for item in snapshot.items:
            self._tell_what_was_missed(item, there)

    def _tell_what_was_missed(self, item: KeyValue, there: set[str]) -> None:
        """A plan that came and whose job ended while etcd was out of sight holds devices until this node has spoken."""
        job, _, what = item.key.removeprefix(self._keys.jobs).partition("/")
        if what != "plan" or job not in self._over or job in self._keepers:
            return
        plan = _parse(Plan, item)
        if plan is None or self._keys.outcome(job, plan.generation, self._site.node) in there:
            return
        if placement_of(plan, self._site) is not None:
            tell_never_started(plan, self._site)

    def _take(self, key: str, item: KeyValue | None) -> None:
        job, _, what = key.removeprefix(self._keys.jobs).partition("/")
        if what == "plan":
            if item is None:
                self._drop(job)
            elif (plan := _parse(Plan, item)) is not None:
                self._want(job, plan)
        elif what == "status" and item is not None:
            status = _parse(JobStatus, item)
            if status is not None and status.state.final:
                self._over.add(job)
                self._drop(job)
        elif what == "status":
            self._over.discard(job)

    def _want(self, job: str, plan: Plan) -> None:
        if job in self._over:
            return
        if job not in self._keepers:
            self._keepers[job] = JobKeeper(job, self._site, self._warm_parent)
            self._running[job] = self._tasks.create_task(self._keep(job))
        self._keepers[job].want(plan)

    async def _keep(self, job: str) -> None:
        await self._keepers[job].run()
        del self._keepers[job], self._running[job]

    def _drop(self, job: str) -> None:
        if (keeper := self._keepers.get(job)) is not None:
            keeper.drop()


def _parse(kind: type[Record], item: KeyValue) -> Record | None:
    try:
        return kind.model_validate_json(item.value)
    except ValidationError as error:
        # Whoever wrote it has to mend it; the other jobs of this node go on.
        log.error("not readable", key=item.key, error=str(error))
        return None
