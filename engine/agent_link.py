"""A rank's line to its agent: progress goes out, pings and stop requests come in. No torch here.

A rank must not outlive its agent: when the agent closes the line, or says nothing for
``RankLaunch.agent_silence_limit_s``, the process ends itself, whatever its main thread is doing.
"""

from __future__ import annotations

import os
import select
import socket
import threading

from engine.planning.messages import (
    EXIT_AGENT_SILENT,
    AnyFromRank,
    Failure,
    Hello,
    RankLaunch,
    StopRequest,
    from_agent,
)

_LONGEST_TEXT = 64 * 1024
_CONNECT_TIMEOUT_S = 5.0


class AgentLink:
    """The line of one rank. Without an agent (under torchrun) it takes messages and drops them."""

    def __init__(self, line: socket.socket | None, silence_limit_s: float) -> None:
        self._line = line
        self._silence_limit_s = silence_limit_s
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._stop: StopRequest | None = None
        if line is not None:
            threading.Thread(target=self._listen, args=(line,), name="agent-link", daemon=True).start()

    @classmethod
    def connect(cls, launch: RankLaunch) -> AgentLink:
        """Connect to ``launch.agent_socket`` and say hello; raises OSError when the agent cannot be reached."""
        if launch.agent_socket is None:
            return cls(None, launch.agent_silence_limit_s)
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.settimeout(_CONNECT_TIMEOUT_S)
        line.connect(launch.agent_socket)
        line.settimeout(None)
        link = cls(line, launch.agent_silence_limit_s)
        link.send(Hello(job=launch.job, generation=launch.generation, rank=launch.rank, pid=os.getpid()))
        return link

    @property
    def stop_requested(self) -> StopRequest | None:
        """The agent's request to stop, once it has come."""
        return self._stop

    def send(self, message: AnyFromRank) -> None:
        """Send one message; safe from any thread. Never raises: an agent that is gone ends this process by itself.

        It waits only when an agent that does not read has let the line fill up, at most for the silence limit.
        """
        if self._line is None:
            return
        if isinstance(message, Failure):
            message = message.model_copy(
                update={"message": message.message[:_LONGEST_TEXT], "traceback": message.traceback[-_LONGEST_TEXT:]}
            )
        data = message.model_dump_json().encode() + b"\n"
        with self._sending:
            try:
                self._line.sendall(data)
            except OSError:
                # The listening thread sees the end of the line as well and ends the process.
                return

    def close(self) -> None:
        """Hang up because this rank is done; the process then no longer depends on its agent."""
        self._closing.set()
        if self._line is not None:
            try:
                self._line.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    def _listen(self, line: socket.socket) -> None:
        pending = b""
        while True:
            # Waiting for data with a time-out, not comparing clocks: a rank that was stopped and goes on again
            # finds the pings of the meantime in its buffer and lives.
            readable, _, _ = select.select([line], [], [], self._silence_limit_s)
            if not readable:
                self._end(f"the agent has been silent for {self._silence_limit_s} s")
                return
            try:
                data = line.recv(65536)
            except OSError:
                data = b""
            if not data:
                self._end("the agent closed the line")
                return
            *lines, pending = (pending + data).split(b"\n")
            for text in lines:
                try:
                    message = from_agent.validate_json(text)
                except ValueError as error:
                    self._end(f"the agent cannot be understood: {error}")
                    return
                if isinstance(message, StopRequest):
                    self._stop = message

    def _end(self, reason: str) -> None:
        if not self._closing.is_set():
            os.write(2, f"everstep: {reason}; this rank ends itself\n".encode())
            os._exit(EXIT_AGENT_SILENT)
