"""The node in etcd: its record and its heartbeat, both under one lease; registered anew when the lease was lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from everstep.protocol.keys import Keys
from everstep.protocol.link import LinkError, Verdict, probe
from everstep.protocol.messages import Heartbeat, NodeRecord, RankStatus
from everstep.protocol.store import Lease, Put, Store, StoreError, StoreUnavailable, Unchanged

_BEAT_S = 1.0
_COALESCE_S = 0.01
_RETRY_S = 0.2
_PROBE_S = 0.5
_EXPIRY_SLACK_S = 1.0

log = structlog.get_logger()


class NameTaken(Exception):
    """Another agent that is alive holds the node's name."""


class Registration:
    """Keeps ``record`` and the heartbeat in etcd. ``registered`` is set after the first success."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        record: NodeRecord,
        token: str,
        lease_ttl_s: int,
        statuses: Callable[[], tuple[RankStatus, ...]],
    ) -> None:
        self._store = store
        self._keys = keys
        self._record = record
        self._token = token
        self._lease_ttl_s = lease_ttl_s
        self._statuses = statuses
        self._lease: Lease | None = None
        self._sequence = 0
        self._news = asyncio.Event()
        self.registered = asyncio.Event()

    def beat(self) -> None:
        """Send a heartbeat now; several calls within some milliseconds make one."""
        self._news.set()

    async def move_meeting(self, port: int) -> None:
        """The meeting store has a new port; returns when the record says so, or will when the node is registered."""
        self._record = self._record.model_copy(update={"meeting_port": port})
        while self._lease is not None:
            try:
                await self._store.put(self._keys.node(self._record.node), _json(self._record), lease=self._lease.id)
                return
            except StoreError as error:
                log.debug("record not written", error=str(error))
                await asyncio.sleep(_RETRY_S)

    async def run(self) -> None:
        """Register, stay registered, for ever. Raises NameTaken."""
        while True:
            try:
                lease = await self._store.lease(self._lease_ttl_s)
            except StoreError as error:
                log.debug("no lease yet", error=str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                await self._register(lease)
                self._lease = lease
                self.registered.set()
                log.info("registered", node=self._record.node, incarnation=self._record.incarnation)
                await lease.lost()
                log.warning("the lease was lost; registering again")
            except StoreError as error:
                # Whatever is wrong with etcd, the ranks go on; LeaseNotFound: it ended before the node was registered.
                log.warning("registration failed; trying again", error=str(error))
                await asyncio.sleep(_RETRY_S)
            finally:
                self._lease = None
                await lease.close()

    async def keep_beating(self) -> None:
        """Write the heartbeat once a second and whenever there is news, for ever."""
        while True:
            try:
                async with asyncio.timeout(_BEAT_S):
                    await self._news.wait()
                # What happens together is told together.
                await asyncio.sleep(_COALESCE_S)
            except TimeoutError:
                pass
            self._news.clear()
            if self._lease is None:
                continue
            try:
                await self._store.put(self._keys.beat(self._record.node), self._next_beat(), lease=self._lease.id)
            except StoreError as error:
                # When the lease was lost, ``run`` hears of it too and gets a new one.
                log.debug("heartbeat not written", error=str(error))

    def _next_beat(self) -> bytes:
        self._sequence += 1
        return _json(
            Heartbeat(
                node=self._record.node,
                incarnation=self._record.incarnation,
                sequence=self._sequence,
                at=time.time(),
                ranks=self._statuses(),
            )
        )

    async def _register(self, lease: Lease) -> None:
        """Write record and heartbeat in one transaction, unless another living agent has the name (NameTaken)."""
        key = self._keys.node(self._record.node)
        deadline = time.monotonic() + lease.ttl_s + _EXPIRY_SLACK_S
        while True:
            try:
                there = await self._store.get(key)
                if there is None:
                    revision = 0
                else:
                    holder = NodeRecord.model_validate_json(there.value)
                    revision = there.mod_revision if await self._may_replace(holder) else -1
                if revision >= 0:
                    puts = [Put(key, _json(self._record), lease.id)]
                    puts.append(Put(self._keys.beat(self._record.node), self._next_beat(), lease.id))
                    if await self._store.transaction([Unchanged(key, revision)], puts) is not None:
                        return
                elif time.monotonic() > deadline:
                    raise NameTaken(
                        f"node name {self._record.node!r} is held by a living agent at {holder.host}:{holder.port} "
                        f"(pid {holder.pid}, incarnation {holder.incarnation})"
                    )
            except StoreUnavailable:
                # Whether a transaction was carried out shows at the next look.
                deadline = time.monotonic() + lease.ttl_s + _EXPIRY_SLACK_S
            await asyncio.sleep(_RETRY_S)

    async def _may_replace(self, holder: NodeRecord) -> bool:
        """Whether a record is our own, or of an agent that is known to be dead although its lease still runs."""
        if holder.incarnation == self._record.incarnation:
            return True
        if holder.host != self._record.host:
            return False
        try:
            verdict = await probe(holder.host, holder.port, self._token, _PROBE_S, incarnation=holder.incarnation)
        except LinkError as error:
            log.warning("whoever listens where the name's holder was will not say who it is", error=str(error))
            return False
        return verdict is Verdict.REFUSED


def _json(message: NodeRecord | Heartbeat) -> bytes:
    return message.model_dump_json().encode()
