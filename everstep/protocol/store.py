"""The only way to etcd: deadlines on every call, leases, transactions, a watch that loses nothing.

Behind it: ``connection.py`` (endpoints, tokens, deadlines), ``listing.py``, ``lease.py``, ``watch.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from etcd3aio._protobuf import Compare, DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest

from everstep.protocol.connection import Connection
from everstep.protocol.lease import Lease
from everstep.protocol.listing import key_value, list_prefix
from everstep.protocol.records import (
    Change,
    KeyValue,
    LeaseNotFound,
    Put,
    Snapshot,
    StoreError,
    StoreUnavailable,
    Unchanged,
)
from everstep.protocol.store_settings import StoreSettings
from everstep.protocol.watch import watch_prefix

__all__ = [
    "Change",
    "KeyValue",
    "Lease",
    "LeaseNotFound",
    "Put",
    "Snapshot",
    "Store",
    "StoreError",
    "StoreSettings",
    "StoreUnavailable",
    "Unchanged",
]


class Store:
    """An etcd client. Every method raises StoreUnavailable within ``call_timeout_s`` when etcd is away.

    Each request is sent at most once. A write that raises StoreUnavailable is ambiguous: etcd may have carried it out.
    Writes with conditions may be tried again after a fresh read.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls, settings: StoreSettings) -> Store:
        """Make a client (does not wait for etcd to be up). Raises ValueError with the field for bad settings."""
        return cls(Connection(settings))

    async def close(self) -> None:
        """Close all connections. End leases and watches before that."""
        await self._connection.close()

    @property
    def silence_s(self) -> float | None:
        """Seconds since etcd last answered (None: never). With a watch running it stays below 2 ``call_timeout_s``."""
        return self._connection.silence_s

    async def get(self, key: str) -> KeyValue | None:
        """One key, linearizable."""
        answer = await self._connection.call(lambda endpoint: endpoint.kv.Range, RangeRequest(key=key.encode()))
        return key_value(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> Snapshot:
        """All keys below ``prefix``, sorted by key."""
        snapshot, _ = await list_prefix(self._connection, prefix)
        return snapshot

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Write one key; returns the revision. Raises LeaseNotFound when ``lease`` has ended."""
        request = PutRequest(key=key.encode(), value=value, lease=lease)
        answer = await self._connection.call(lambda endpoint: endpoint.kv.Put, request)
        return int(answer.header.revision)

    async def delete(self, key: str) -> None:
        """Delete one key, if it is there."""
        await self._connection.call(lambda endpoint: endpoint.kv.DeleteRange, DeleteRangeRequest(key=key.encode()))

    async def transaction(
        self, conditions: Sequence[Unchanged], puts: Sequence[Put], deletes: Sequence[str] = ()
    ) -> int | None:
        """Carry out all writes if all conditions hold; returns the revision, None when a condition did not hold.

        A key may be written once only; etcd takes up to 128 writes. Raises LeaseNotFound when a lease has ended.
        StoreUnavailable leaves open whether the writes were carried out, all or none: read before trying again.
        """
        request = TxnRequest(
            compare=[_compare(condition) for condition in conditions],
            success=[
                *(RequestOp(request_put=PutRequest(key=p.key.encode(), value=p.value, lease=p.lease)) for p in puts),
                *(RequestOp(request_delete_range=DeleteRangeRequest(key=key.encode())) for key in deletes),
            ],
        )
        answer = await self._connection.call(lambda endpoint: endpoint.kv.Txn, request)
        return int(answer.header.revision) if answer.succeeded else None

    async def lease(self, ttl_s: int) -> Lease:
        """Grant a lease and keep it alive in the background; ``Lease.ttl_s`` is what etcd granted."""
        return await Lease.grant(self._connection, ttl_s)

    def watch(self, prefix: str, *, relist_interval_s: float = 300.0) -> AsyncIterator[Snapshot | Change]:
        """Yield a Snapshot, then every Change in order, for ever; survives etcd being away.

        After compaction, when etcd's data are not the same any more, and every ``relist_interval_s`` it lists anew and
        yields another Snapshot. No event is yielded twice; none is lost, but those before a Snapshot are told by it.
        Raises StoreError when etcd forbids it.
        """
        return watch_prefix(self._connection, prefix, relist_interval_s)


def _compare(condition: Unchanged) -> Compare:
    if condition.mod_revision == 0:
        return Compare(key=condition.key.encode(), target=Compare.CREATE, result=Compare.EQUAL, create_revision=0)
    return Compare(
        key=condition.key.encode(), target=Compare.MOD, result=Compare.EQUAL, mod_revision=condition.mod_revision
    )
