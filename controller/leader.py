"""Leadership: one key under a lease. Every write of the controller is conditional on it, so a ghost can do nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from controller.board import Board
from everstep.protocol.keys import Keys
from everstep.protocol.store import Lease, LeaseNotFound, Put, Store, StoreUnavailable, Unchanged

_log = logging.getLogger(__name__)

RETRY_S = 0.5


class NotLeader(Exception):
    """Another controller leads, or none does yet."""


class Leadership:
    """Strives for leadership while ``run`` runs, and writes in its name.

    A successor waits until the predecessor's lease has ended: it may still be at work.
    """

    def __init__(self, store: Store, keys: Keys, board: Board, *, identity: str, ttl_s: int) -> None:
        self._store = store
        self._keys = keys
        self._board = board
        self._identity = identity
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._revision = 0
        self._won = asyncio.Event()

    @property
    def held(self) -> bool:
        """Whether this controller leads, as far as it knows."""
        return self._won.is_set()

    async def run(self) -> None:
        """Lead whenever possible, for ever."""
        while True:
            try:
                await self._strive()
            except (StoreUnavailable, LeaseNotFound) as error:
                _log.warning("leadership: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _strive(self) -> None:
        lease = await self._store.lease(self._ttl_s)
        try:
            put = Put(self._keys.leader, self._identity.encode(), lease=lease.id)
            ended = asyncio.ensure_future(lease.lost())
            while not ended.done():
                revision = await self._store.transaction([Unchanged(self._keys.leader, 0)], [put])
                if revision is None:
                    await self._board.changed(RETRY_S)
                    while self._board.view.leader is not None and not ended.done():
                        await self._board.changed(RETRY_S)
                    continue
                _log.info("leading as %s", self._identity)
                self._lease, self._revision = lease, revision
                self._won.set()
                self._board.concern_all()
                await ended
                _log.warning("leadership lost")
        finally:
            self._won.clear()
            self._lease = None
            await lease.close()

    async def held_within(self, timeout_s: float) -> bool:
        """Wait for leadership; False when it does not come within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._won.wait()
        except TimeoutError:
            return False
        return True

    async def transaction(
        self, conditions: Sequence[Unchanged], puts: Sequence[Put], deletes: Sequence[str] = ()
    ) -> int | None:
        """As ``Store.transaction``, and only while this controller leads. Raises NotLeader, StoreUnavailable.

        None: a condition did not hold, leadership among them.
        """
        if not self.held:
            raise NotLeader("this controller does not lead")
        mine = Unchanged(self._keys.leader, self._revision)
        return await self._store.transaction([mine, *conditions], puts, deletes)
