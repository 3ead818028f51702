"""The node agent: everything that one node needs to take part, put together."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
from pydantic import BaseModel

from engine.planning.messages import SaveFailed
from everstep.protocol.keys import Keys
from everstep.protocol.messages import CheckpointRecord, Device, Event, NodeOutcome, NodeRecord, RankStatus
from everstep.protocol.store import Store
from worker.endpoint import Endpoint
from worker.generation import Site
from worker.jobs import Jobs
from worker.logs import keep_rotating
from worker.outbox import Outbox
from worker.rank_lines import RankLines
from worker.registration import Registration
from worker.settings import AgentSettings
from worker.state_dir import StateDir
from worker.warm_client import Ending
from worker.warm_keeper import WarmKeeper

_LAST_WRITES_S = 3.0

log = structlog.get_logger()


class Measured(BaseModel):
    """What the preflight found."""

    devices: tuple[Device, ...]
    versions: dict[str, str]


@dataclass(frozen=True)
class ReadyFile:
    """What is known once the node is registered, for whoever started the agent."""

    node: str
    pid: int
    port: int
    meeting_port: int


class Agent:
    """One node agent. ``guardian`` is the pid of the one child that the agent must not end."""

    def __init__(self, settings: AgentSettings, state: StateDir, guardian: int) -> None:
        self._settings = settings
        self._state = state
        self._keys = Keys(settings.store.root)
        self._incarnation = uuid.uuid4().hex
        self._started_at = time.time()
        self._jobs: Jobs | None = None
        self._registration: Registration | None = None
        self._outbox: Outbox
        self._lines = RankLines(
            state.socket,
            beat=self._beat,
            committed=self._note_checkpoint,
            save_failed=self._note_failed_save,
            now=time.time,
        )
        self._endpoint = Endpoint(settings.node, self._incarnation, settings.token)
        self._warm = WarmKeeper(settings.entry, settings.host, state.warm_parent_log, guardian, self)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set, then end the ranks, say how they ended, and leave the cluster.

        Raises NameTaken, WarmParentLost, HelperFailed (in an ExceptionGroup once the node has started to serve).
        """
        store = await Store.connect(self._settings.store)
        self._outbox = Outbox(store)
        try:
            await self._lines.start()
            port = await self._endpoint.start(self._settings.host)
            starting = asyncio.create_task(self._warm_up())
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await self._serve(store, port, starting.result(), stop)
            for task in (starting, stopped):
                task.cancel()
            await asyncio.wait({starting, stopped})
        finally:
            await self._warm.stop()
            self._lines.close()
            await self._endpoint.close()
            await store.close()

    async def _warm_up(self) -> Measured:
        await self._warm.start()
        choice = self._settings.devices
        handle = await self._warm.ready()
        _, found = await handle.run(
            "measure",
            kind=choice.kind,
            num_devices=choice.num_devices,
            num_threads=self._settings.threads_per_rank,
        )
        return Measured.model_validate(found)

    async def _serve(self, store: Store, port: int, measured: Measured, stop: asyncio.Event) -> None:
        settings = self._settings
        record = NodeRecord(
            node=settings.node,
            incarnation=self._incarnation,
            host=settings.host,
            port=port,
            meeting_port=self._warm.meeting_port,
            devices=measured.devices,
            domain=settings.domain,
            versions={"python": platform.python_version(), **measured.versions},
            pid=os.getpid(),
            started_at=self._started_at,
        )
        registration = Registration(
            store, self._keys, record, settings.token, settings.lease_ttl_s, statuses=self._statuses
        )
        self._registration = registration
        site = Site(
            node=settings.node,
            incarnation=self._incarnation,
            host=settings.host,
            devices=measured.devices,
            state=self._state,
            lines=self._lines,
            silence_limit_s=settings.rank_silence_limit_s,
            num_threads=settings.threads_per_rank,
            publish=self._publish,
            beat=self._beat,
        )
        async with asyncio.TaskGroup() as tasks:
            jobs = self._jobs = Jobs(self._keys, site, self._warm.ready, tasks)
            following = tasks.create_task(jobs.follow(store.watch(self._keys.jobs)))
            background = [
                tasks.create_task(work)
                for work in (
                    registration.run(),
                    registration.keep_beating(),
                    self._outbox.run(),
                    self._lines.keep_pinging(),
                    self._warm.keep(),
                    keep_rotating(self._rank_logs),
                    self._tell_ready(registration, port),
                )
            ]
            await stop.wait()
            log.info("stopping")
            following.cancel()
            await jobs.shut_down()
            if not await self._outbox.drained(_LAST_WRITES_S):
                log.error("etcd is away; the last outcomes are lost")
            # The lease is revoked on the way out.
            for task in background:
                task.cancel()

    async def _tell_ready(self, registration: Registration, port: int) -> None:
        await registration.registered.wait()
        if (path := self._settings.ready_file) is not None:
            ready = ReadyFile(self._settings.node, os.getpid(), port, self._warm.meeting_port)
            _write_ready_file(path, ready)

    def rank_ended(self, ending: Ending) -> None:
        """A rank has ended (called by the warm parent's keeper)."""
        if self._jobs is not None:
            self._jobs.ended(ending)

    def rank_gone(self, pid: int) -> None:
        """Nothing is left of a rank's session (called by the warm parent's keeper)."""
        if self._jobs is not None:
            self._jobs.gone(pid)

    def ranks_lost(self, reason: str) -> None:
        """The warm parent died and every rank with it (called by the warm parent's keeper)."""
        if self._jobs is not None:
            self._jobs.lost(reason)

    async def meeting_moved(self, port: int) -> None:
        """The meeting store has a new port (called by the warm parent's keeper)."""
        if self._registration is not None:
            await self._registration.move_meeting(port)

    def _statuses(self) -> tuple[RankStatus, ...]:
        if self._jobs is None:
            return ()
        return tuple(
            rank.status()
            for generation in self._jobs.generations
            for rank in generation.ranks
            if rank.pid is not None and rank.exit is None
        )

    def _rank_logs(self) -> list[Path]:
        if self._jobs is None:
            return []
        return [rank.log for generation in self._jobs.generations for rank in generation.ranks if not rank.gone]

    def _beat(self) -> None:
        if self._registration is not None:
            self._registration.beat()

    def _publish(self, outcome: NodeOutcome) -> None:
        key = self._keys.outcome(outcome.job, outcome.generation, outcome.node)
        self._outbox.put(key, outcome.model_dump_json().encode())

    def _note_checkpoint(self, record: CheckpointRecord) -> None:
        key = self._keys.checkpoint(record.job, record.step, record.generation)
        self._outbox.put(key, record.model_dump_json().encode())

    def _note_failed_save(self, job: str, failed: SaveFailed) -> None:
        """The agent writes this event itself: training goes on, so there is nothing for the controller to decide."""
        what = f"{failed.file}: {failed.reason}" if failed.file else failed.reason
        event = Event(
            at=time.time(),
            kind="save_failed",
            job=job,
            generation=failed.generation,
            message=f"the save after step {failed.step} failed, {failed.failures_in_a_row} in a row: {what}",
            data=failed.model_dump(exclude={"kind"}),
        )
        self._outbox.put(self._keys.event(job, event.at, 0), event.model_dump_json().encode())


def _write_ready_file(path: Path, ready: ReadyFile) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(asdict(ready)))
    aside.rename(path)
