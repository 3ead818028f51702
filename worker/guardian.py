"""The guardian: a small process that outlives its agent for a moment and ends what the agent's ranks had started.

A SIGKILLed agent takes its warm parent and ranks along by the kernel's parent-death signal, but not the processes that
ranks started themselves. The guardian sees the agent's end of a pipe close and ends those sessions.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from worker.processes import set_name
from worker.state_dir import StateDir

_CLEANUP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Guardian:
    """The agent's side: closing ``pipe`` lets the guardian go."""

    pid: int
    pipe: int

    def release(self) -> None:
        """Let the guardian look round once more and wait for its end."""
        os.close(self.pipe)
        os.waitpid(self.pid, 0)


def start_guardian(state: StateDir) -> Guardian:
    """Fork the guardian. Call it while the process is still small and has no threads."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reader)
        return Guardian(pid, writer)
    try:
        # In a session of its own, so that an interrupt typed at a terminal reaches the agent alone.
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(writer)
        set_name("es:guardian")
        os.read(reader, 1)
        state.end_leftovers(_CLEANUP_TIMEOUT_S)
        state.remove_socket()
    finally:
        os._exit(0)
