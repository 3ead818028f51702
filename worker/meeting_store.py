"""The process that hosts the store in which generations meet. It lives apart from the warm parent on purpose.

A process that both hosts a TCPStore and forks leaves locked resolver and server state in its children, which then hang.
One store serves every generation; their prefixes keep them apart.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from typing import Any


def serve_meetings(report: Callable[[Any], None], host: str) -> None:
    """Host a TCPStore on a free port of ``host``, report ``{"port": ...}``, and serve until killed."""
    from torch._C._distributed_c10d import TCPStore

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # We bind it ourselves: torch would listen on every address. Port 0, so that there is no fixed one to fight over.
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    report({"port": store.port})
    while True:
        signal.pause()
