"""A TCPStore in a process of its own, started once a test session: ranks meet there."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import time

_pid: int | None = None


def meeting_store() -> str:
    """Address HOST:PORT of the store; starts it on first use. It ends with this process."""
    global _pid
    if _pid is None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        host, port = listener.getsockname()
        address = f"{host}:{port}"
        parent = os.getpid()
        _pid = os.fork()
        if _pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever a test has set in the process that forks
            from torch.distributed import TCPStore

            server = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno())
            while os.getppid() == parent:
                time.sleep(0.2)
            del server
            os._exit(0)
        listener.close()
        os.environ["EVERSTEP_TEST_STORE"] = address
        atexit.register(_end, os.getpid())
    return os.environ["EVERSTEP_TEST_STORE"]


def _end(owner: int) -> None:
    if _pid is not None and os.getpid() == owner:
        os.kill(_pid, signal.SIGKILL)
        os.waitpid(_pid, 0)
