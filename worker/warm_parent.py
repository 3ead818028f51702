"""The warm parent (``python -m worker.warm_parent``): imports torch once, then only forks, reaps and reports.

It serves its agent over an inherited socket, one JSON object a line:

    {"op": "fork", "id", "launch", "log", "rank_file"}             -> {"event": "forked", "id", "pid"}
    {"op": "run", "id", "what": "store" | "measure", "arguments"}  -> {"event": "result", "id", "pid", "value", "error"}
    {"op": "kill", "pids", "signal"}                     no answer; the ends are reported
    end of file                                          -> everything is killed and this process ends

and reports by itself ``ready``, ``exit`` {pid, code, signal, signalled, at} and, once no process of a rank's session is
left, ``gone`` {pid}. It never runs a backward and never starts a thread: both would hang its children.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from engine.planning.messages import RankLaunch
from worker.forked_rank import become_rank, leave_parent
from worker.meeting_store import serve_meetings
from worker.preflight import measure
from worker.processes import (
    all_processes,
    become_subreaper,
    close_files_above,
    die_with_parent,
    is_ending,
    kill,
    owner,
    set_name,
)

_HELPERS: dict[str, Callable[..., None]] = {"store": serve_meetings, "measure": measure}
_LOOK_AGAIN_S = 0.01
_READ_SIZE = 1 << 20

Entry = Callable[[RankLaunch], int]


@dataclass
class Child:
    """A process that this one has forked. ``owner`` is set for ranks alone: see OWNER_VARIABLE."""

    pid: int
    owner: str | None = None
    signalled: bool = False


class WarmParent:
    """The serving loop, single-threaded; every child is known until it has been reaped."""

    def __init__(self, agent: socket.socket, entry: Entry) -> None:
        self._agent = agent
        self._entry = entry
        self._pid = os.getpid()
        self._children: dict[int, Child] = {}
        self._closing: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._results: dict[int, tuple[str, int, bytes]] = {}
        self._pending = b""
        self._open = True

    def serve(self) -> None:
        """Serve until the agent hangs up, then end every child."""
        wake_reader, wake_writer = os.pipe()
        os.set_blocking(wake_reader, False)
        os.set_blocking(wake_writer, False)
        # A handler has to be there for the wake-up byte to be written; the work is done in the loop.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        self._selector.register(self._agent, selectors.EVENT_READ)
        self._selector.register(wake_reader, selectors.EVENT_READ)
        self._report(event="ready")
        while self._open:
            for key, _ in self._selector.select(_LOOK_AGAIN_S if self._closing else None):
                if key.fileobj is self._agent:
                    self._read_requests()
                elif key.fd == wake_reader:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_reader, 4096)
                else:
                    self._read_result(key.fd)
            self._reap()
        self._end_all()

    def _report(self, **event: Any) -> None:
        try:
            self._agent.sendall(json.dumps(event).encode() + b"\n")
        except OSError:
            # The agent is gone; its end of file ends the loop.
            self._open = False

    def _read_requests(self) -> None:
        data = self._agent.recv(_READ_SIZE)
        if not data:
            self._open = False
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["op"] == "fork":
                self._fork_rank(request)
            elif request["op"] == "run":
                self._run_helper(request)
            else:
                assert request["op"] == "kill"
                self._kill(request["pids"], request["signal"])

    def _fork_rank(self, request: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            become_rank(self._pid, request["launch"], Path(request["log"]), Path(request["rank_file"]), self._entry)
        self._children[pid] = Child(pid, owner=request["rank_file"])
        self._report(event="forked", id=request["id"], pid=pid)

    def _run_helper(self, request: dict[str, Any]) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become_helper(request["what"], request["arguments"], writer)
        os.close(writer)
        self._children[pid] = Child(pid)
        self._results[reader] = (request["id"], pid, b"")
        self._selector.register(reader, selectors.EVENT_READ)

    def _become_helper(self, what: str, arguments: dict[str, Any], writer: int) -> None:
        code = 1
        try:
            leave_parent(self._pid, f"es:{what}")
            own = os.dup2(writer, 3)
            close_files_above(own)

            def report(value: Any) -> None:
                os.write(own, json.dumps({"value": value}).encode() + b"\n")
                os.close(own)

            try:
                _HELPERS[what](report, **arguments)
                code = 0
            except Exception as error:
                traceback.print_exc()
                os.write(own, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _read_result(self, reader: int) -> None:
        data = os.read(reader, _READ_SIZE)
        name, pid, before = self._results[reader]
        text = before + data
        if data and not text.endswith(b"\n"):
            self._results[reader] = (name, pid, text)
            return
        del self._results[reader]
        self._selector.unregister(reader)
        os.close(reader)
        answer = json.loads(text) if text.endswith(b"\n") else {"error": "it ended without an answer"}
        self._report(event="result", id=name, pid=pid, value=answer.get("value"), error=answer.get("error"))

    def _kill(self, pids: list[int], number: int) -> None:
        # Those that have ended by themselves are reported as such, not as ended by us.
        self._reap()
        for pid in pids:
            # Not reaped yet, so neither its pid nor its group's number can belong to anybody else.
            if (child := self._children.get(pid)) is not None:
                child.signalled = child.signalled or not is_ending(pid)
                try:
                    os.killpg(pid, number)
                except ProcessLookupError:
                    # It has not founded its group yet.
                    os.kill(pid, number)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if ended is None:
                break
            child = self._children.pop(ended.si_pid, None)
            if child is not None and child.owner is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                self._closing[child.pid] = child
            os.waitpid(ended.si_pid, 0)
            if child is not None:
                exited = ended.si_code == os.CLD_EXITED
                self._report(
                    event="exit",
                    pid=child.pid,
                    code=ended.si_status if exited else None,
                    signal=None if exited else ended.si_status,
                    signalled=child.signalled,
                    at=time.time(),
                )
        if self._closing:
            self._close_sessions()

    def _close_sessions(self) -> None:
        """Kill what ended ranks have left behind; report those whose session is empty."""
        living = [process for process in all_processes() if not process.dead]
        strays = [process for process in living if process.parent == self._pid and process.pid not in self._children]
        owners = {process.pid: owner(process) for process in strays}
        ranks_live = any(child.owner is not None for child in self._children.values())
        for child in list(self._closing.values()):
            left = [process for process in living if child.pid in (process.session, process.group)]
            left += [stray for stray in strays if owners[stray.pid] == child.owner or not ranks_live]
            for process in left:
                kill(process)
            if not left:
                del self._closing[child.pid]
                self._report(event="gone", pid=child.pid)

    def _end_all(self) -> None:
        """Kill every descendant and wait for all of them."""
        while True:
            for process in all_processes():
                if process.parent == self._pid and not process.dead:
                    kill(process)
            try:
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            except ChildProcessError:
                return
            time.sleep(0.002)


def _load(entry: str) -> Entry:
    module, _, function = entry.partition(":")
    return cast(Entry, getattr(importlib.import_module(module), function))


def main() -> None:
    """Import, then serve the agent."""
    parser = argparse.ArgumentParser(prog="python -m worker.warm_parent")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--agent-pid", type=int, required=True)
    parser.add_argument("--entry", required=True)
    options = parser.parse_args()
    die_with_parent(options.agent_pid)
    become_subreaper()
    set_name("es:warm-parent")
    agent = socket.socket(fileno=options.control_fd)
    agent.set_inheritable(False)
    import torch

    torch.set_num_threads(1)
    entry = _load(options.entry)
    # What is here stays as it is: without a collector that touches it, the ranks go on sharing these pages.
    gc.collect()
    gc.freeze()
    WarmParent(agent, entry).serve()


if __name__ == "__main__":
    main()
