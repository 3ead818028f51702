"""Writes to etcd that must not be lost: kept, newest value per key, until etcd has taken them."""

from __future__ import annotations

import asyncio

import structlog

from everstep.protocol.store import Store, StoreError, StoreUnavailable

_RETRY_S = 0.2

log = structlog.get_logger()


class Outbox:
    """A queue of writes in the order of their keys' first appearance. ``run`` sends them, for ever."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[str, bytes] = {}
        self._filled = asyncio.Event()

    def put(self, key: str, value: bytes) -> None:
        """Write ``value`` at ``key`` as soon as etcd can be reached; an older value still waiting is dropped."""
        self._waiting[key] = value
        self._filled.set()

    async def run(self) -> None:
        """Send whatever waits, until cancelled."""
        while True:
            await self._filled.wait()
            key = next(iter(self._waiting))
            value = self._waiting[key]
            try:
                await self._store.put(key, value)
            except StoreUnavailable:
                await asyncio.sleep(_RETRY_S)
                continue
            except StoreError as error:
                log.error("etcd refuses a write; dropped", key=key, error=str(error))
            # A newer value may have come while this one was under way.
            if self._waiting[key] == value:
                del self._waiting[key]
            if not self._waiting:
                self._filled.clear()

    async def drained(self, timeout_s: float) -> bool:
        """Wait until nothing waits; False when that takes longer than ``timeout_s``."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._waiting:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True
