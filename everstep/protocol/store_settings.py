"""How to reach etcd."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc


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


def user_of(settings: StoreSettings) -> tuple[str, str] | None:
    """Name and password, if there is a user. Raises ValueError with the field."""
    if settings.username is None and settings.password is None:
        return None
    if settings.username is None or settings.password is None:
        raise ValueError("username, password: give both or neither")
    return settings.username, settings.password


def tls_of(settings: StoreSettings) -> tuple[bytes, bytes | None, bytes | None] | None:
    """Certificate authority, our key, our certificate, if TLS is asked for. Raises ValueError with the field."""
    if (settings.cert_file is None) != (settings.key_file is None):
        raise ValueError("cert_file, key_file: give both or neither")
    if settings.ca_file is None:
        if settings.cert_file is not None:
            raise ValueError("ca_file: needed with cert_file")
        return None
    return (
        _read("ca_file", settings.ca_file),
        _read("key_file", settings.key_file) if settings.key_file is not None else None,
        _read("cert_file", settings.cert_file) if settings.cert_file is not None else None,
    )


def credentials_of(settings: StoreSettings) -> grpc.ChannelCredentials | None:
    """For TLS, if it is asked for. Raises ValueError with the field."""
    import grpc  # here, so that settings can be read by a process that must stay small before it forks

    tls = tls_of(settings)
    return None if tls is None else grpc.ssl_channel_credentials(*tls)


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: {error}") from error
