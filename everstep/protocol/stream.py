"""A stream of requests and answers with etcd, read with an eye on the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

from everstep.protocol.connection import Connection
from everstep.protocol.endpoint import Endpoint
from everstep.protocol.records import StoreUnavailable


class Stream:
    """An open stream. Whoever opened it closes it."""

    def __init__(self, connection: Connection, endpoint: Endpoint, call: Any, timeout_s: float) -> None:
        connection.enter(endpoint)
        self._connection = connection
        self._endpoint = endpoint
        self._call = call
        self._timeout_s = timeout_s
        self._read = self._start_read()

    @classmethod
    async def open(
        cls,
        connection: Connection,
        rpc: Callable[[Endpoint], Any],
        first: Any,
        timeout_s: float,
        *,
        fresh_token: bool = False,
    ) -> Stream:
        """Open a stream and send its first request, within ``timeout_s``. Raises StoreUnavailable, StoreError."""
        async with connection.use(timeout_s) as endpoint:
            token = await connection.token(endpoint, fresh=fresh_token)
            # hasleader: a member cut off from the others ends the stream instead of staying silent.
            call = rpc(endpoint)(metadata=(*token, ("hasleader", "true")))
            try:
                await call.write(first)
            except BaseException:
                call.cancel()
                raise
            return cls(connection, endpoint, call, timeout_s)

    async def read(self, timeout_s: float) -> Any | None:
        """The next answer, None if there is none within ``timeout_s``. Raises StoreUnavailable, StoreError."""
        done, _ = await asyncio.wait({self._read}, timeout=timeout_s)
        if not done:
            return None
        if self._read.cancelled():
            raise StoreUnavailable("the connection was closed")
        try:
            answer = self._read.result()
        except grpc.aio.AioRpcError as error:
            raise self._connection.translate(error, self._endpoint) from error
        if answer is grpc.aio.EOF:
            raise StoreUnavailable(f"etcd at {self._endpoint.address} ended the stream")
        self._connection.heard()
        self._read = self._start_read()
        return answer

    async def write(self, request: Any) -> None:
        """Send another request, within the time that opening had. Raises StoreUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._call.write(request)
        except TimeoutError:
            raise self.silent() from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the stream has just ended; the pending read tells how

    def silent(self) -> StoreUnavailable:
        """The error to raise when an answer is overdue; later calls use another connection."""
        self._connection.gave_no_answer(self._endpoint)
        return StoreUnavailable(f"the stream from etcd at {self._endpoint.address} fell silent")

    def close(self) -> None:
        """End the stream."""
        self._call.cancel()
        self._read.cancel()
        self._connection.leave(self._endpoint)

    def _start_read(self) -> asyncio.Task[Any]:
        # Cancelling a read cancels the whole stream, so one read is left pending while we look at the clock.
        read: asyncio.Task[Any] = asyncio.ensure_future(self._call.read())
        # A stream that is closed has nobody left to look at how its last read ended.
        read.add_done_callback(lambda done: done.cancelled() or done.exception())
        return read
