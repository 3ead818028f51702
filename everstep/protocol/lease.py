"""A lease, kept alive in the background."""

from __future__ import annotations

import asyncio
import contextlib
import time

from etcd3aio._protobuf import LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest

from everstep.protocol.backoff import Backoff
from everstep.protocol.connection import Connection
from everstep.protocol.records import LeaseNotFound, StoreUnavailable
from everstep.protocol.stream import Stream


class Lease:
    """A lease that is kept alive in the background until ``close`` or until it is ``lost``.

    While etcd is away the lease is neither kept nor lost: etcd grants the whole time anew when it comes back, or says
    that the lease has ended. How long it is certain to live is ``remaining_s``.
    """

    id: int
    ttl_s: int

    def __init__(self, connection: Connection, lease_id: int, ttl_s: int, renewed_at: float) -> None:
        """For a lease that was granted after ``renewed_at`` (monotonic clock). Needs a running event loop."""
        self.id = lease_id
        self.ttl_s = ttl_s
        self._connection = connection
        self._renewed_at = renewed_at
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(), name=f"lease {lease_id:x}")
        self._keeper.add_done_callback(self._tell)

    @classmethod
    async def grant(cls, connection: Connection, ttl_s: int) -> Lease:
        """Get a new lease of ``ttl_s`` seconds, or more if that is below etcd's minimum."""
        if ttl_s < 1:
            raise ValueError(f"ttl_s: must be at least 1, not {ttl_s}")
        asked_at = time.monotonic()
        answer = await connection.call(lambda endpoint: endpoint.leases.LeaseGrant, LeaseGrantRequest(TTL=ttl_s))
        return cls(connection, answer.ID, answer.TTL, asked_at)

    @property
    def remaining_s(self) -> float:
        """Seconds for which the lease is certain to live on without being renewed; 0 when that time has passed."""
        if self._ended.done():
            return 0.0
        return max(0.0, self._renewed_at + self.ttl_s - time.monotonic())

    async def lost(self) -> None:
        """Return when the lease is known to have ended (expired or revoked); its keys are gone then.

        Raises StoreError if etcd refuses to keep it for another reason.
        """
        await asyncio.shield(self._ended)

    async def close(self) -> None:
        """Revoke it: its keys vanish at once, or when its time has passed if etcd is away. ``lost`` returns."""
        self._keeper.cancel()
        await asyncio.wait({self._keeper})
        if self._keeper.cancelled() and not self._ended.done():
            self._ended.set_result(None)
            with contextlib.suppress(StoreUnavailable, LeaseNotFound):
                await self._connection.call(
                    lambda endpoint: endpoint.leases.LeaseRevoke, LeaseRevokeRequest(ID=self.id)
                )

    async def _keep(self) -> None:
        interval_s = self.ttl_s / 3
        backoff = Backoff(cap_s=min(1.0, interval_s))
        while True:
            await asyncio.sleep(max(0.0, self._renewed_at + interval_s - time.monotonic()))
            try:
                if not await self._renew():
                    return
                backoff.reset()
            except StoreUnavailable:
                await backoff.wait()

    def _tell(self, keeper: asyncio.Task[None]) -> None:
        if keeper.cancelled():
            return
        error = keeper.exception()
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def _renew(self) -> bool:
        """Ask etcd for the whole time again; False when the lease has ended."""
        asked_at = time.monotonic()
        # Short enough that another endpoint can still save the lease when this one does not answer.
        timeout_s = min(self._connection.timeout_s, self.ttl_s / 3)
        stream = await Stream.open(
            self._connection,
            lambda endpoint: endpoint.leases.LeaseKeepAlive,
            LeaseKeepAliveRequest(ID=self.id),
            timeout_s,
        )
        try:
            answer = await stream.read(timeout_s)
            if answer is None:
                raise stream.silent()
        finally:
            stream.close()
        if answer.TTL <= 0:
            return False
        self._renewed_at = asked_at
        return True
