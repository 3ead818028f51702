"""Following every change below a prefix, through whatever happens to etcd.

List, then watch from the revision after the list. A watch that breaks is taken up again from the last revision that was
handed out, so that no change is lost or seen twice; where etcd no longer has those revisions, or may not be the same
etcd any more, and now and then for good measure, it is listed anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from etcd3aio._protobuf import WatchCreateRequest, WatchRequest

from everstep.protocol.backoff import Backoff
from everstep.protocol.connection import Compacted, Connection
from everstep.protocol.listing import key_value, list_prefix, range_end
from everstep.protocol.records import Change, Snapshot, StoreError, StoreUnavailable
from everstep.protocol.stream import Stream

_log = logging.getLogger(__name__)

_DELETE = 1  # mvccpb.Event.DELETE


async def watch_prefix(
    connection: Connection, prefix: str, relist_interval_s: float
) -> AsyncIterator[Snapshot | Change]:
    """See ``Store.watch``."""
    backoff = Backoff()
    position: int | None = None  # everything up to this revision has been handed out; None: list first
    cluster_id = 0
    relist_at = 0.0
    while True:
        watch = None
        try:
            if position is None:
                snapshot, cluster_id = await list_prefix(connection, prefix)
                relist_at = time.monotonic() + relist_interval_s
                position = snapshot.revision
                yield snapshot
            watch = await _Watch.create(connection, prefix, position + 1, cluster_id)
            while (changes := await watch.next(relist_at)) is not None:
                backoff.reset()
                for change in changes:
                    if change.revision > position:
                        yield change
                if changes:
                    position = max(position, changes[-1].revision)
            position = None
        except Compacted as error:
            _log.info("watch of %s: %s; listing anew", prefix, error)
            position = None
            await backoff.wait()
        except StoreUnavailable as error:
            _log.info("watch of %s: %s; trying again", prefix, error)
            await backoff.wait()
        finally:
            if watch is not None:
                watch.close()


class _Watch:
    """One watch on one connection, until the first thing that is not right."""

    def __init__(self, connection: Connection, stream: Stream) -> None:
        self._patience_s = connection.timeout_s
        self._stream = stream

    @classmethod
    async def create(cls, connection: Connection, prefix: str, start: int, cluster_id: int) -> _Watch:
        """Watch from revision ``start``. Raises as ``next``; Compacted also when the data are not those listed."""
        create = WatchCreateRequest(
            key=prefix.encode() or b"\0", range_end=range_end(prefix.encode()), start_revision=start
        )
        # A fresh token: a watch is refused for an old one without a word that it was the token.
        stream = await Stream.open(
            connection,
            lambda endpoint: endpoint.watches.Watch,
            WatchRequest(create_request=create),
            connection.timeout_s,
            fresh_token=True,
        )
        watch = cls(connection, stream)
        try:
            created = await watch._receive(connection.timeout_s)
            if created is None:
                raise stream.silent()
            if created.header.cluster_id != cluster_id or created.header.revision < start - 1:
                raise Compacted("etcd's data are not those that were listed (or this member lags behind)")
        except BaseException:
            watch.close()
            raise
        return watch

    async def next(self, until: float) -> list[Change] | None:
        """The next changes in order (none: a sign of life), or None when the monotonic clock passed ``until``.

        Raises StoreUnavailable when the stream broke or fell silent, Compacted when etcd cancelled it for that reason,
        StoreError when it is forbidden.
        """
        asked = False
        while True:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return None
            response = await self._receive(min(self._patience_s, left_s))
            if response is not None:
                return [_change(event) for event in response.events]
            if left_s <= self._patience_s:
                return None
            if asked:
                raise self._stream.silent()
            # Etcd says nothing about a quiet prefix of its own accord. Its answer shows that it lives; the revision in
            # the answer may run ahead of events still on their way (before 3.5.8), so it moves no position.
            await self._stream.write(WatchRequest(progress_request={}))
            asked = True

    def close(self) -> None:
        """End the watch."""
        self._stream.close()

    async def _receive(self, timeout_s: float) -> Any | None:
        response = await self._stream.read(timeout_s)
        if response is None:
            return None
        if response.compact_revision:
            raise Compacted(f"compacted up to revision {response.compact_revision}")
        if response.canceled:
            if "permission denied" in response.cancel_reason:
                raise StoreError(f"watch refused: {response.cancel_reason}")
            raise StoreUnavailable(f"etcd cancelled the watch: {response.cancel_reason or 'no reason given'}")
        return response


def _change(event: Any) -> Change:
    item = None if event.type == _DELETE else key_value(event.kv)
    return Change(revision=event.kv.mod_revision, key=event.kv.key.decode(), item=item)
