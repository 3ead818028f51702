"""The agent's handle on its warm parent: start it, ask it to fork, hear of every end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from everstep.protocol.store_options import PASSWORD_VARIABLE
from worker.processes import all_processes, kill

_LINE_LIMIT = 4 << 20


class WarmParentLost(Exception):
    """The warm parent has ended (or never came up); whatever it had forked ends with it."""


class HelperFailed(Exception):
    """A helper (measuring, meeting store) ended with an error; the text says which."""


@dataclass(frozen=True)
class Ending:
    """How a forked process ended. ``signalled``: the agent had asked for it before it ended."""

    pid: int
    exit_code: int | None
    signal: int | None
    signalled: bool
    at: float


@dataclass(frozen=True)
class Listener:
    """Whom to tell: a process ended; nothing is left of a rank's session."""

    ended: Callable[[Ending], None]
    gone: Callable[[int], None]


class WarmParentHandle:
    """One warm parent process. Make it with ``start``."""

    def __init__(self, process: subprocess.Popen[bytes], listener: Listener) -> None:
        self._process = process
        self._listener = listener
        self._open: dict[int, tuple[Callable[[dict[str, Any]], None], asyncio.Future[None]]] = {}
        self._number = 0
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader: asyncio.Task[None]
        self._writer: asyncio.StreamWriter

    @property
    def pid(self) -> int:
        """Pid of the warm parent."""
        return self._process.pid

    @classmethod
    async def start(cls, entry: str, log: Path, listener: Listener) -> WarmParentHandle:
        """Start one and wait until it has imported everything.

        Raises WarmParentLost with the end of its log when it does not come up.
        """
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "worker.warm_parent", "--control-fd", str(theirs.fileno())]
        command += ["--agent-pid", str(os.getpid()), "--entry", entry]
        process = _launch(command, theirs, log)
        handle = cls(process, listener)
        reader, handle._writer = await asyncio.open_connection(sock=ours, limit=_LINE_LIMIT)
        handle._reader = asyncio.create_task(handle._read(reader))
        try:
            await handle._ready
        except WarmParentLost:
            await handle.closed()
            raise WarmParentLost(f"the warm parent did not come up:\n{_end_of(log)}") from None
        return handle

    async def fork(self, *, launch: str, log: Path, rank_file: Path, started: Callable[[int], None]) -> None:
        """Fork one rank. ``started`` gets its pid before the listener hears of its end. Raises WarmParentLost."""
        await self._ask(
            lambda answer: started(answer["pid"]),
            op="fork",
            launch=launch,
            log=str(log),
            rank_file=str(rank_file),
        )

    async def run(self, what: str, **arguments: Any) -> tuple[int, dict[str, Any]]:
        """Run a helper; returns its pid and what it reported. Raises HelperFailed, WarmParentLost."""
        answers: list[dict[str, Any]] = []
        await self._ask(answers.append, op="run", what=what, arguments=arguments)
        answer = answers[0]
        if answer["error"] is not None:
            raise HelperFailed(f"{what}: {answer['error']}")
        return answer["pid"], answer["value"]

    def kill(self, pids: list[int], number: Signals) -> None:
        """Send a signal to the process groups of ranks that have not ended yet."""
        self._send(op="kill", pids=pids, signal=int(number))

    async def closed(self) -> int:
        """Wait until this warm parent and every descendant of it is gone; returns its return code.

        When it died, its descendants have become children of this process (a subreaper) and are ended here.
        """
        await asyncio.shield(self._reader)
        self._writer.close()
        code = None
        while code is None:
            code = self._process.poll()
            if code is None:
                await asyncio.sleep(0.002)
        return code

    async def stop(self) -> None:
        """Have it end everything that it forked, then itself."""
        with contextlib.suppress(OSError):
            self._writer.write_eof()
        await self.closed()

    def _send(self, **request: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(request).encode() + b"\n")

    async def _ask(self, answered: Callable[[dict[str, Any]], None], **request: Any) -> None:
        """Send a request and wait for its answer; ``answered`` gets it before any later event is looked at."""
        if self._reader.done():
            raise WarmParentLost("the warm parent has ended")
        self._number += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[self._number] = (answered, done)
        self._send(**request, id=self._number)
        await done

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._take(json.loads(line))
        lost = WarmParentLost("the warm parent has ended")
        for done in [*(done for _, done in self._open.values()), self._ready]:
            if not done.done():
                done.set_exception(lost)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "ready":
            self._ready.set_result(None)
        elif kind == "exit":
            self._listener.ended(Ending(event["pid"], event["code"], event["signal"], event["signalled"], event["at"]))
        elif kind == "gone":
            self._listener.gone(event["pid"])
        else:
            answered, done = self._open.pop(event["id"])
            answered(event)
            if not done.done():
                done.set_result(None)


async def end_adopted_children(keep: int, timeout_s: float) -> bool:
    """Kill and reap every child of this process but ``keep``; what a dead warm parent left has come here.

    Returns False when some outlast ``timeout_s``.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        children = [process for process in all_processes() if process.parent == os.getpid() and process.pid != keep]
        for process in children:
            if not process.dead:
                kill(process)
        for process in children:
            _reap(process.pid)
        if not children:
            return True
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.002)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _launch(command: list[str], theirs: socket.socket, log: Path) -> subprocess.Popen[bytes]:
    # One thread each, and a dead name server must not hold up the meeting; both are read when libraries load.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),
    }
    environment.pop(PASSWORD_VARIABLE, None)  # ranks run what users bring
    with theirs, log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )


def _end_of(log: Path) -> str:
    return log.read_bytes()[-4000:].decode(errors="replace")
