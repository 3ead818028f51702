"""Free TCP ports for servers that must be able to take the same port again after a restart."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path

_LOWEST = 15_000


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nobody listens now, below those that the kernel gives to outgoing connections.

    A port from that range could be taken by any client (or by a client connecting to itself) while the server restarts.
    Raises OSError when none was found.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    above = first_ephemeral if first_ephemeral > _LOWEST + 1000 else 65_536
    for port in random.sample(range(_LOWEST, above), 100):
        if is_free(host, port):
            return port
    raise OSError(f"no free port on {host} between {_LOWEST} and {above}")


def is_free(host: str, port: int, *, wait_s: float = 0.0) -> bool:
    """Whether a server could listen on ``port``, now or within ``wait_s``."""
    deadline = time.monotonic() + wait_s
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        try:
            with socket.create_server((host, port), family=family):
                return True
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
