"""What the store hands out and takes in, and how it fails."""

from __future__ import annotations

from dataclasses import dataclass


class StoreError(Exception):
    """Etcd answered with an error that trying again will not cure."""


class StoreUnavailable(StoreError):
    """Etcd did not answer in time, or no connection could be made.

    A write that ends so is ambiguous: etcd may have carried it out, or may do so until the call's deadline. Read before
    trying again, or make the write conditional, so that carrying it out twice does no harm.
    """


class LeaseNotFound(StoreError):
    """The lease that a write names has ended: get a new one."""


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
    """Every key below the prefix at ``revision``: the first thing a watch yields, and again after it had to re-list.

    Whoever follows a watch replaces all it knew by the items: what is missing was deleted in the meantime.
    """

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
