"""Which of etcd's errors pass by themselves: a write that meets one is to be kept and sent again."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from everstep.protocol.connection import Connection
from everstep.protocol.records import StoreUnavailable
from everstep.protocol.store_settings import StoreSettings
from tests.coroutines import in_event_loop


@pytest.mark.parametrize(
    ("code", "details", "passes"),
    [
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: leader changed", True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: too many requests", True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "grpc: received message larger than max", False),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large", False),
        (grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied", False),
    ],
)
def test_what_passes(code: grpc.StatusCode, details: str, passes: bool) -> None:
    @in_event_loop
    async def translate() -> None:
        connection = Connection(StoreSettings(("127.0.0.1:1",)))
        nothing = grpc.aio.Metadata()
        error = grpc.aio.AioRpcError(code, nothing, nothing, details=details)
        assert isinstance(connection.translate(error, connection._endpoints[0]), StoreUnavailable) is passes
        await connection.close()

    translate()
