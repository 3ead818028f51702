"""The only code that talks to etcd: deadlines on every call, leases with keepalive, transactions, a watch that loses nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field


class StoreError(Exception):
    """Etcd answered with an error that trying again will not cure."""


class StoreUnavailable(StoreError):
    """Etcd did not answer in time, or no connection could be made."""


@dataclass(frozen=True)
class StoreSettings:
    """How to reach etcd. ``endpoints`` are HOST:PORT."""

    endpoints: tuple[str, ...]
    root: str = "/everstep"
    call_timeout_s: float = 3.0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


@dataclass(frozen=True)
class KeyValue:
    """One key as it stands."""

    key: str
    value: bytes
    mod_revision: int
    create_revision: int
    lease: int = 0


@dataclass(frozen=True)
class Snapshot:
    """Every key below the prefix at ``revision``: the first thing a watch yields, and again after it had to re-list."""

    revision: int
    items: tuple[KeyValue, ...]


@dataclass(frozen=True)
class Change:
    """One key changed at ``revision``; ``item`` None means it was deleted (or its lease ended)."""

    revision: int
    key: str
    item: KeyValue | None


@dataclass(frozen=True)
class Unchanged:
    """Condition of a transaction: ``key`` still has this mod_revision (0: it does not exist)."""

    key: str
    mod_revision: int


@dataclass(frozen=True)
class Put:
    """One write of a transaction."""

    key: str
    value: bytes
    lease: int = 0


class Lease:
    """A lease that is kept alive in the background until ``close`` or until it is ``lost``."""

    id: int
    ttl_s: int

    async def lost(self) -> None:
        """Return when the lease is known to have ended (expired or revoked); its keys are gone then."""
        raise NotImplementedError

    async def close(self) -> None:
        """Revoke it: its keys vanish at once."""
        raise NotImplementedError


class Store:
    """An etcd client. Every method raises StoreUnavailable within ``call_timeout_s`` when etcd is away."""

    @classmethod
    async def connect(cls, settings: StoreSettings) -> Store:
        """Make a client (does not wait for etcd to be up)."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close all connections."""

    async def get(self, key: str) -> KeyValue | None:
        """One key, linearizable."""
        raise NotImplementedError

    async def list(self, prefix: str) -> Snapshot:
        """All keys below ``prefix``, sorted by key."""
        raise NotImplementedError

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Write one key; returns the revision."""
        raise NotImplementedError

    async def delete(self, key: str) -> None:
        """Delete one key, if it is there."""

    async def transaction(
        self, conditions: Sequence[Unchanged], puts: Sequence[Put], deletes: Sequence[str] = ()
    ) -> int | None:
        """Carry out all writes if all conditions hold; returns the revision, None when a condition did not hold."""
        raise NotImplementedError

    async def lease(self, ttl_s: int) -> Lease:
        """Grant a lease and keep it alive in the background."""
        raise NotImplementedError

    def watch(self, prefix: str, *, relist_interval_s: float = 300.0) -> AsyncIterator[Snapshot | Change]:
        """Yield a Snapshot, then every Change in order, for ever; survives etcd being away.

        After compaction, a cancelled watch, or a long silence it lists anew and yields another Snapshot. No event is
        yielded twice, none is lost.
        """
        raise NotImplementedError
