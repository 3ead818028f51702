"""Every key below a prefix as it stood at one revision."""

from __future__ import annotations

from typing import Any

from etcd3aio._protobuf import RangeRequest

from everstep.protocol.connection import Connection
from everstep.protocol.records import KeyValue, Snapshot

_PAGE = 1000


def range_end(prefix: bytes) -> bytes:
    """The first key after all that begin with ``prefix``, as etcd wants it (a single zero byte: there is none)."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\0"


def key_value(kv: Any) -> KeyValue:
    """A key of ours from etcd's message."""
    return KeyValue(
        key=kv.key.decode(),
        value=kv.value,
        mod_revision=kv.mod_revision,
        create_revision=kv.create_revision,
        lease=kv.lease,
    )


async def list_prefix(connection: Connection, prefix: str) -> tuple[Snapshot, int]:
    """The snapshot, and the id of the cluster it came from.

    Read in pages, all of the first one's revision, so that no answer grows without bound. Raises Compacted
    (a StoreUnavailable: try again) if compaction overtook the reading.
    """
    start = prefix.encode() or b"\0"
    end = range_end(prefix.encode())
    items: list[KeyValue] = []
    revision = 0
    while True:
        page = await connection.call(
            lambda endpoint: endpoint.kv.Range,
            RangeRequest(key=start, range_end=end, limit=_PAGE, revision=revision),
        )
        revision = revision or page.header.revision
        items.extend(key_value(kv) for kv in page.kvs)
        if not page.more:
            return Snapshot(revision, tuple(items)), page.header.cluster_id
        start = page.kvs[-1].key + b"\0"
