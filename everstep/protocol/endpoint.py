"""One member of the etcd cluster: the connection to it, and what can be called on it."""

from __future__ import annotations

import grpc
import grpc.aio
from etcd3aio._protobuf import AuthStub, KVStub, LeaseStub, WatchStub

_OPTIONS: list[tuple[str, int]] = [
    # Reconnect soon after etcd is back. The minimum is also the time that a connection may take to come up.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # With this the kernel drops a connection whose data nobody acknowledges (host gone, network cut) after 3 s. etcd
    # refuses pings ("too_many_pings") more often than every 5 s, and any while no call is on.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),  # a write must not be sent twice behind our back
    ("grpc.use_local_subchannel_pool", 1),  # a new channel makes a new connection
    ("grpc.enable_http_proxy", 0),
]


class Endpoint:
    """A member's address, its channel, and who still uses that."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.address = address
        self.credentials = credentials
        self.channel: grpc.aio.Channel = (
            grpc.aio.insecure_channel(address, options=_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
        )
        self.kv = KVStub(self.channel)
        self.leases = LeaseStub(self.channel)
        self.watches = WatchStub(self.channel)
        self.auth = AuthStub(self.channel)
        self.users = 0  # calls and streams that are on
        self.retired = False  # to be closed when the last user has left

    async def connected(self) -> bool:
        """Wait until the connection stands (True) or an attempt to make it has failed (False)."""
        while True:
            state = self.channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                return True
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                return False
            await self.channel.wait_for_state_change(state)
