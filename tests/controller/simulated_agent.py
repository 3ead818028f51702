"""Agents without ranks: they register, beat, answer their link, and say whatever a test wants to have happened.

An agent plays its part of each plan by itself: ranks step at once, a drain saves and ends well, a kill ends them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from everstep.protocol.keys import Keys
from everstep.protocol.link import Frame, read_frame, write_frame
from everstep.protocol.messages import (
    CheckpointRecord,
    Device,
    Heartbeat,
    NodeOutcome,
    NodeRecord,
    Placement,
    Plan,
    RankExit,
    RankStatus,
)
from everstep.protocol.store import Change, Lease, Store

TOKEN = "a-token-for-tests-only"
TIMINGS = {"start": 0.01, "meet": 0.02, "build": 0.03, "restore": 0.04, "first_step": 0.05}


class SimulatedAgent:
    """One node. ``step`` is how far its ranks are said to be beyond their start."""

    def __init__(self, store: Store, keys: Keys, name: str, *, devices: int = 2, ttl_s: int = 2) -> None:
        self.name = name
        self.steps_done = 1
        self.plan: Plan | None = None
        self.outcomes: list[NodeOutcome] = []
        self._store = store
        self._keys = keys
        self._devices = devices
        self._ttl_s = ttl_s
        self._answering = True
        self._connections: set[asyncio.StreamWriter] = set()
        self._sequence = 0
        self._ranks: tuple[RankStatus, ...] = ()
        self._lease: Lease | None = None

    async def start(self) -> None:
        """Listen, register, beat once, follow plans."""
        self.incarnation = secrets.token_hex(4)
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        await self.register()
        self._following = asyncio.create_task(self._follow())

    async def register(self) -> None:
        """Take a lease and write the node's keys under it."""
        lease = await self._store.lease(self._ttl_s)
        self._lease = lease
        record = NodeRecord(
            node=self.name,
            incarnation=self.incarnation,
            host="127.0.0.1",
            port=self.port,
            meeting_port=9,
            devices=tuple(
                Device(kind="cpu", index=i, memory_bytes=1 << 30, peak_flops=2e10) for i in range(self._devices)
            ),
            pid=1,
            started_at=time.time(),
        )
        await self._store.put(self._keys.node(self.name), record.model_dump_json().encode(), lease=lease.id)
        await self.beat()

    async def beat(self) -> None:
        """Write the heartbeat now."""
        self._sequence += 1
        beat = Heartbeat(
            node=self.name, incarnation=self.incarnation, sequence=self._sequence, at=time.time(), ranks=self._ranks
        )
        assert self._lease is not None
        value = beat.model_dump_json().encode()
        await self._store.put(self._keys.beat(self.name), value, lease=self._lease.id)

    async def lose_lease(self) -> None:
        """The node's keys vanish though the agent lives on."""
        assert self._lease is not None
        await self._lease.close()

    async def fall_silent(self) -> None:
        """As a frozen host: the lease ends, connections stay open, nothing is answered."""
        self._answering = False
        self._following.cancel()
        await self.lose_lease()

    async def die(self) -> None:
        """As by SIGKILL: connections end, nothing listens any more; the lease lives on until it expires."""
        self._following.cancel()
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()

    async def close(self) -> None:
        """Leave nothing behind."""
        await self.die()
        assert self._lease is not None
        await self._lease.close()

    async def end_ranks(self, *exits: RankExit, all_gone: bool = True, **more: Any) -> None:
        """Write the outcome of the current generation here."""
        assert self.plan is not None
        outcome = NodeOutcome(
            job=self.plan.job,
            generation=self.plan.generation,
            node=self.name,
            incarnation=self.incarnation,
            exits=exits,
            all_gone=all_gone,
            **more,
        )
        self.outcomes.append(outcome)
        key = self._keys.outcome(self.plan.job, self.plan.generation, self.name)
        await self._store.put(key, outcome.model_dump_json().encode())

    def exits(self, **how: Any) -> tuple[RankExit, ...]:
        """All ranks here, ended in one way."""
        step = how.pop("step", self.step)
        return tuple(RankExit(rank=rank, pid=1, at=time.time(), step=step, **how) for rank in self.placement.ranks)

    @property
    def placement(self) -> Placement:
        """Ours in the current plan."""
        assert self.plan is not None
        return next(placement for placement in self.plan.placements if placement.node == self.name)

    @property
    def step(self) -> int:
        """Completed steps of the current generation's ranks."""
        assert self.plan is not None
        return (self.plan.restore.step if self.plan.restore else 0) + self.steps_done

    async def save(self, step: int) -> None:
        """Index a checkpoint, as the agent of rank 0 does."""
        assert self.plan is not None
        job, generation = self.plan.job, self.plan.generation
        record = CheckpointRecord(
            job=job,
            step=step,
            generation=generation,
            directory=f"{self.plan.run.checkpoint.directory}/step-{step}.g{generation}",
            num_bytes=1,
            seconds=0.1,
            at=time.time(),
        )
        await self._store.put(self._keys.checkpoint(job, step, generation), record.model_dump_json().encode())

    async def report(self) -> None:
        """Beat with the ranks of the current plan at the current step."""
        assert self.plan is not None
        self._ranks = tuple(
            RankStatus(
                job=self.plan.job,
                generation=self.plan.generation,
                rank=rank,
                device=device,
                pid=1,
                phase="stepping",
                step=self.step,
                since=time.time(),
                loss=2.5,
                mfu=0.4,
                step_s=0.5,
                timings=TIMINGS,
            )
            for rank, device in zip(self.placement.ranks, self.placement.devices, strict=True)
        )
        await self.beat()

    async def _follow(self) -> None:
        async for item in self._store.watch(self._keys.jobs):
            found = (item.item,) if isinstance(item, Change) else item.items
            for one in found:
                if one is not None and one.key.endswith("/plan"):
                    await self._take(Plan.model_validate_json(one.value))

    async def _take(self, plan: Plan) -> None:
        ours = any((p.node, p.incarnation) == (self.name, self.incarnation) for p in plan.placements)
        fresh = self.plan is None or plan.job != self.plan.job or plan.generation > self.plan.generation
        if fresh and self.plan is not None and self._ranks:
            now = time.time()
            exits = self.exits(stopped_by_us=True, signal=9)
            self._ranks = ()
            await self.end_ranks(*exits, stop_began_at=now - 0.05, stop_ended_at=now)
        if not ours:
            return
        self.plan = plan
        if plan.stop == "kill":
            exits = self.exits(stopped_by_us=True, signal=9)
            self._ranks = ()
            await self.beat()
            await self.end_ranks(*exits)
        elif plan.stop == "save":
            began = time.time()
            exits = self.exits(complete=True)
            self._ranks = ()
            if 0 in self.placement.ranks:
                await self.save(self.step)
            await self.end_ranks(*exits, stop_began_at=began, stop_ended_at=time.time())
            await self.beat()
        elif fresh:
            await self.report()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while (frame := await read_frame(reader)) is not None:
                await self._answer_frame(frame, writer)
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer_frame(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        if self._answering:
            good = frame.header == {"op": "hello", "token": TOKEN}
            await write_frame(writer, {"ok": good, "node": self.name, "incarnation": self.incarnation})
