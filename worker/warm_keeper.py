"""Keeps one warm parent and one meeting store running, whatever happens to them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

import structlog

from worker.warm_client import Ending, HelperFailed, Listener, WarmParentHandle, WarmParentLost, end_adopted_children

_ATTEMPTS = 3
_PAUSE_S = 0.5
_CLEANUP_S = 10.0

log = structlog.get_logger()


class Owner(Protocol):
    """Whom the keeper tells what happened."""

    def rank_ended(self, ending: Ending) -> None:
        """A rank has ended."""

    def rank_gone(self, pid: int) -> None:
        """Nothing is left of a rank's session."""

    def ranks_lost(self, reason: str) -> None:
        """Every rank has ended with the warm parent, and nothing is left of them."""

    async def meeting_moved(self, port: int) -> None:
        """The meeting store was started anew on ``port``."""


class WarmKeeper:
    """The warm parent of an agent; a dead one is replaced. ``spare_pid`` is a child of the agent to leave alone."""

    def __init__(self, entry: str, host: str, log_file: Path, spare_pid: int, owner: Owner) -> None:
        self._entry = entry
        self._host = host
        self._log_file = log_file
        self._spare_pid = spare_pid
        self._owner = owner
        self._handle: WarmParentHandle | None = None
        self._up = asyncio.Event()
        self._store_pid = 0
        self._store_died = asyncio.Event()
        self.meeting_port = 0

    async def start(self) -> None:
        """Start warm parent and store. Raises WarmParentLost or HelperFailed when they do not come up."""
        self._handle = await WarmParentHandle.start(
            self._entry, self._log_file, Listener(self._ended, self._owner.rank_gone)
        )
        await self._start_store(self._handle)
        self._up.set()

    async def ready(self) -> WarmParentHandle:
        """The warm parent, as soon as there is one."""
        await self._up.wait()
        assert self._handle is not None
        return self._handle

    async def keep(self) -> None:
        """Replace the warm parent or the store when one dies, for ever.

        Raises WarmParentLost or HelperFailed when that fails several times in a row.
        """
        while True:
            handle = await self.ready()
            died = asyncio.create_task(handle.closed())
            store_died = asyncio.create_task(self._store_died.wait())
            try:
                await asyncio.wait({died, store_died}, return_when=asyncio.FIRST_COMPLETED)
                if died.done():
                    await self._replace(died.result())
                else:
                    log.error("the meeting store died; starting another")
                    await self._start_store(handle)
                await self._owner.meeting_moved(self.meeting_port)
            except WarmParentLost:
                if self._handle is not handle:
                    raise
                # It died while the store was being replaced; the next turn sees that.
            finally:
                died.cancel()
                store_died.cancel()

    async def stop(self) -> None:
        """End the warm parent and everything that it forked."""
        if self._handle is not None:
            await self._handle.stop()
        await end_adopted_children(self._spare_pid, _CLEANUP_S)

    async def _replace(self, code: int) -> None:
        self._up.clear()
        self._handle = None
        reason = f"the warm parent died ({code}), its ranks with it"
        log.error("the warm parent died", code=code)
        if not await end_adopted_children(self._spare_pid, _CLEANUP_S):
            log.error("processes of the dead warm parent do not go")
        self._owner.ranks_lost(reason)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                await self.start()
                return
            except (WarmParentLost, HelperFailed) as error:
                if attempt == _ATTEMPTS:
                    raise
                log.error("no new warm parent; trying again", error=str(error))
                await asyncio.sleep(_PAUSE_S * attempt)

    async def _start_store(self, handle: WarmParentHandle) -> None:
        self._store_died.clear()
        self._store_pid, found = await handle.run("store", host=self._host)
        self.meeting_port = int(found["port"])

    def _ended(self, ending: Ending) -> None:
        if ending.pid == self._store_pid:
            self._store_died.set()
        else:
            self._owner.rank_ended(ending)
