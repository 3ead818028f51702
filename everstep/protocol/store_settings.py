"""How to reach etcd."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

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


def credentials_of(settings: StoreSettings) -> grpc.ChannelCredentials | None:
    """For TLS, if it is asked for. Raises ValueError with the field."""
    if (settings.cert_file is None) != (settings.key_file is None):
        raise ValueError("cert_file, key_file: give both or neither")
    if settings.ca_file is None:
        if settings.cert_file is not None:
            raise ValueError("ca_file: needed with cert_file")
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read("ca_file", settings.ca_file),
        private_key=_read("key_file", settings.key_file) if settings.key_file is not None else None,
        certificate_chain=_read("cert_file", settings.cert_file) if settings.cert_file is not None else None,
    )


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: {error}") from error
