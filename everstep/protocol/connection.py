"""The connection to etcd's endpoints: tokens, a deadline on every call, one word for each kind of failure.

Each endpoint has a channel of its own and one is used at a time; after a failure the next one's turn comes. (One
channel over all of them would go on giving every third call to a frozen member, and can check only one host name.)
A channel on which a call got no answer in time is replaced: its connection may stand and yet pass nothing for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from etcd3aio._protobuf import AuthenticateRequest

from everstep.protocol.endpoint import Endpoint
from everstep.protocol.records import LeaseNotFound, StoreError, StoreUnavailable
from everstep.protocol.store_settings import StoreSettings, credentials_of, user_of

_UNAVAILABLE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,  # a stream reset by a server that is going down
    grpc.StatusCode.ABORTED,
)

_PASSING = ("too many requests", "database space exceeded")
"""What etcd runs out of for a while: trying again helps. (It does not when a value is too large.)"""


class Compacted(StoreUnavailable):
    """The revision asked for is gone; list anew."""


class Connection:
    """The endpoint in use, and the calls through it."""

    def __init__(self, settings: StoreSettings) -> None:
        """Raises ValueError with the field for settings that cannot work."""
        if not settings.endpoints:
            raise ValueError("endpoints: give at least one HOST:PORT")
        if not settings.call_timeout_s > 0:
            raise ValueError(f"call_timeout_s: must be above 0, not {settings.call_timeout_s}")
        self.timeout_s = settings.call_timeout_s
        self._user = user_of(settings)
        credentials = credentials_of(settings)
        self._endpoints = [Endpoint(address, credentials) for address in settings.endpoints]
        self._current = 0
        self._token: str | None = None
        self._heard_at: float | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close all channels; whatever is still under way on them ends as cancelled."""
        await asyncio.gather(*(endpoint.channel.close() for endpoint in self._endpoints), *self._closing)

    def heard(self) -> None:
        """Note that etcd has just answered."""
        self._heard_at = time.monotonic()

    @property
    def silence_s(self) -> float | None:
        """Seconds since etcd last answered anything; None: it never did."""
        return None if self._heard_at is None else time.monotonic() - self._heard_at

    @asynccontextmanager
    async def use(self, timeout_s: float) -> AsyncIterator[Endpoint]:
        """A connected endpoint, for as long as ``timeout_s`` allows; the time to connect counts.

        What goes wrong inside comes out as StoreUnavailable or StoreError. That is a matter of this connection alone:
        the caller's own cancellation passes through.
        """
        endpoint = None
        try:
            async with asyncio.timeout(timeout_s):
                endpoint = await self._connected()
                self.enter(endpoint)
                yield endpoint
        except TimeoutError:
            if endpoint is None:
                raise StoreUnavailable(f"no connection to etcd within {timeout_s:g} s: {self._addresses}") from None
            self.gave_no_answer(endpoint)
            raise StoreUnavailable(f"no answer from etcd at {endpoint.address} within {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            assert endpoint is not None
            raise self.translate(error, endpoint) from error
        finally:
            if endpoint is not None:
                self.leave(endpoint)

    async def call(self, rpc: Callable[[Endpoint], Any], request: Any) -> Any:
        """Send ``request`` once, within the deadline, and return the answer.

        Raises StoreUnavailable when etcd is away (the request may have been carried out), StoreError when it refuses.
        """
        async with self.use(self.timeout_s) as endpoint:
            token = await self.token(endpoint)
            try:
                answer = await rpc(endpoint)(request, metadata=token, timeout=self.timeout_s)
            except grpc.aio.AioRpcError as error:
                if self._user is None or not _is_about_the_token(error):
                    raise
                # Refused before it was looked at: etcd forgets tokens when it restarts and after some minutes.
                token = await self.token(endpoint, fresh=True)
                answer = await rpc(endpoint)(request, metadata=token, timeout=self.timeout_s)
        self.heard()
        return answer

    async def token(self, endpoint: Endpoint, *, fresh: bool = False) -> tuple[tuple[str, str], ...]:
        """What to send along with every request: the user's token, if there is a user."""
        if self._user is None:
            return ()
        if self._token is None or fresh:
            name, password = self._user
            request = AuthenticateRequest(name=name, password=password)
            self._token = (await endpoint.auth.Authenticate(request, timeout=self.timeout_s)).token
        return (("token", self._token or ""),)

    def translate(self, error: grpc.aio.AioRpcError, endpoint: Endpoint) -> StoreError:
        """Our word for what gRPC says; turns away from an endpoint that failed."""
        code, details = error.code(), error.details() or ""
        text = f"etcd at {endpoint.address}: {details} ({code.name})"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self.gave_no_answer(endpoint)
            return StoreUnavailable(text)
        if code in _UNAVAILABLE:
            self._use_next(endpoint)
            return StoreUnavailable(text)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and any(part in details for part in _PASSING):
            return StoreUnavailable(text)
        if code is grpc.StatusCode.OUT_OF_RANGE and "compacted" in details:
            return Compacted(text)
        if code is grpc.StatusCode.NOT_FOUND and "lease" in details:
            return LeaseNotFound(text)
        return StoreError(text)

    def gave_no_answer(self, endpoint: Endpoint) -> None:
        """Replace the channel of a connected endpoint that did not answer in time, and turn to the next endpoint."""
        if endpoint in self._endpoints:
            self._use_next(endpoint)
            self._endpoints[self._endpoints.index(endpoint)] = Endpoint(endpoint.address, endpoint.credentials)
            endpoint.retired = True

    def enter(self, endpoint: Endpoint) -> None:
        """Note that somebody uses the endpoint's channel."""
        endpoint.users += 1

    def leave(self, endpoint: Endpoint) -> None:
        """The end of ``enter``: the last one out closes a channel that has been replaced."""
        endpoint.users -= 1
        if endpoint.retired and endpoint.users == 0:
            closing = asyncio.create_task(endpoint.channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _connected(self) -> Endpoint:
        """The endpoint in use if its connection stands, else the next one that connects."""
        for _ in self._endpoints:
            endpoint = self._endpoints[self._current]
            connected = False
            try:
                connected = await endpoint.connected()
            finally:  # also when the deadline ends the waiting
                if not connected:
                    self._use_next(endpoint)
            if connected:
                return endpoint
        raise StoreUnavailable(f"no connection to etcd: {self._addresses}")

    def _use_next(self, failed: Endpoint) -> None:
        if self._endpoints[self._current] is failed:  # else somebody else has turned away from it already
            self._current = (self._current + 1) % len(self._endpoints)

    @property
    def _addresses(self) -> str:
        return ", ".join(endpoint.address for endpoint in self._endpoints)


def _is_about_the_token(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.UNAUTHENTICATED or "revision of auth store is old" in (error.details() or "")
