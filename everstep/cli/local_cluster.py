"""A whole cluster on this machine: etcd, the controller and node agents as processes of their own on loopback.

Each process is started by this one's main thread and killed by the kernel when this process ends, however that
happens; what an agent starts ends with the agent. ``stop`` ends everything in order. No process is ever looked for by
name.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from everstep.cli.engine_program import module_command
from everstep.cli.output import BadInput, OperationFailed
from everstep.protocol.etcd_server import EtcdStartError, PrivateEtcd
from everstep.protocol.processes import spawn, terminate

_HOST = "127.0.0.1"
_READY_POLL_S = 0.05
_READY_TIMEOUT_S = 60.0
_AGENT_GRACE_S = 10.0
_CONTROLLER_GRACE_S = 5.0
_LOG_TAIL_BYTES = 2000


@dataclass(frozen=True)
class ClusterSettings:
    """What a local cluster looks like.

    ``state`` holds the token, etcd's data, logs and the agents' directories. Jobs' paths are below ``data_root``.
    ``port`` 0 picks a free one. ``lease_ttl_s`` is how long a silent node counts as alive, ``settle_s`` how long the
    controller waits after a change of layout before it makes another one that nothing forces.
    """

    state: Path
    data_root: Path
    num_nodes: int = 4
    ranks_per_node: int = 2
    device: str = "cpu"
    port: int = 0
    root: str = "/everstep"
    lease_ttl_s: int = 3
    settle_s: float | None = None


@dataclass
class _Member:
    """One process of the cluster and how it tells that it is ready."""

    name: str
    command: list[str]
    ready_file: Path
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def spawn(self) -> None:
        """Start it; it is ready when its ready file is there."""
        self.ready_file.unlink(missing_ok=True)
        self.process = spawn(self.command, log_path=self.log, env=_environment())

    def ended_with(self) -> int | None:
        """Its return code once it has ended."""
        return None if self.process is None else self.process.poll()

    def failure(self, what: str) -> OperationFailed:
        """What went wrong with it, and the end of its log."""
        tail = self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""
        return OperationFailed(f"{self.name} {what}; end of {self.log}:\n{tail}".rstrip())


class LocalCluster:
    """Use as a context manager: whatever was started is stopped at the end of the block."""

    def __init__(self, settings: ClusterSettings, on_progress: Callable[[str], None] = lambda name: None) -> None:
        self.settings = settings
        self._on_progress = on_progress
        self.etcd = PrivateEtcd(settings.state / "etcd")
        """The cluster's own etcd; may be stopped and started again on its data."""
        self._controller: _Member | None = None
        self._agents: dict[str, _Member] = {}
        self._lock: int | None = None
        self._url: str | None = None

    @property
    def url(self) -> str:
        """Where the controller listens; known after ``start``."""
        assert self._url is not None, "not started yet"
        return self._url

    @property
    def node_names(self) -> tuple[str, ...]:
        """All nodes of the cluster, running or not."""
        return tuple(f"node-{number}" for number in range(self.settings.num_nodes))

    @property
    def pids(self) -> dict[str, int]:
        """Pids of what runs now, by name."""
        members = [self._controller, *self._agents.values()]
        running = {m.name: m.process.pid for m in members if m is not None and m.process and m.ended_with() is None}
        return {"etcd": self.etcd.pid, **running} if self._lock is not None else running

    @property
    def log_directory(self) -> Path:
        """Logs of the controller and the agents."""
        return self.settings.state / "logs"

    def start(self) -> None:
        """Bring everything up; returns when all are ready.

        Raises BadInput when the state directory or the port is in use, OperationFailed with the end of a log when
        something does not come up.
        """
        state = self.settings.state
        state.mkdir(parents=True, exist_ok=True)
        self.settings.data_root.mkdir(parents=True, exist_ok=True)
        self._take_state_directory()
        self._write_token()
        try:
            self.etcd.start()
        except EtcdStartError as error:
            raise OperationFailed(str(error)) from None
        self._on_progress("etcd")
        self._controller = self._controller_member(self.settings.port)
        self._controller.spawn()
        for name in self.node_names:
            self._spawn_agent(name)
        self._wait_ready([self._controller, *self._agents.values()])
        self._url = json.loads(self._controller.ready_file.read_text())["url"]

    def start_node(self, name: str) -> None:
        """Start the agent of a node that does not run; returns at once, it registers by itself when it is ready."""
        agent = self._agents.get(name)
        assert agent is None or agent.ended_with() is not None, f"{name} runs already"
        self._spawn_agent(name)

    def kill_node(self, name: str) -> float:
        """SIGKILL the agent of a node, from outside; returns the wall-clock time of the kill."""
        return _kill(self._agents[name])

    def kill_controller(self) -> float:
        """SIGKILL the controller, from outside; returns the wall-clock time of the kill."""
        assert self._controller is not None
        return _kill(self._controller)

    def start_controller(self) -> None:
        """Start the controller again, at the address it had; returns when it serves."""
        assert self._controller is not None and self._controller.ended_with() is not None, "the controller runs"
        self._controller = self._controller_member(port=int(self.url.rpartition(":")[2]))
        self._controller.spawn()
        self._wait_ready([self._controller])

    def check(self) -> None:
        """Raise OperationFailed when etcd or the controller has ended by itself."""
        if self.etcd.process.poll() is not None:
            raise OperationFailed(f"etcd ended with code {self.etcd.process.poll()}; its log: {self.etcd.log_path}")
        if self._controller is not None and self._controller.ended_with() is not None:
            raise self._controller.failure(f"ended with code {self._controller.ended_with()}")

    def ended_nodes(self) -> list[str]:
        """Nodes whose agent has ended."""
        return [name for name, agent in self._agents.items() if agent.ended_with() is not None]

    def stop(self) -> None:
        """End all that was started: the controller, the agents side by side, then etcd. May be called at any time.

        The controller goes first, so that it does not take the agents' ends for faults.
        """
        if self._controller is not None and self._controller.process is not None:
            terminate(self._controller.process, _CONTROLLER_GRACE_S)
            self._controller = None
        agents = [agent.process for agent in self._agents.values() if agent.process is not None]
        threads = [threading.Thread(target=terminate, args=(process, _AGENT_GRACE_S)) for process in agents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._agents.clear()
        self.etcd.stop()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _take_state_directory(self) -> None:
        lock = os.open(self.settings.state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise BadInput(f"another cluster runs in {self.settings.state}; give --state-dir") from None
        self._lock = lock

    def _write_token(self) -> None:
        self._token_file.unlink(missing_ok=True)
        handle = os.open(self._token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")

    @property
    def _token_file(self) -> Path:
        return self.settings.state / "token"

    def _member(self, name: str, module: str, options: dict[str, object]) -> _Member:
        ready = self.settings.state / "ready" / name
        ready.parent.mkdir(exist_ok=True)
        common: dict[str, object] = {
            "--etcd": self.etcd.endpoint,
            "--root": self.settings.root,
            "--host": _HOST,
            "--token-file": self._token_file,
            "--lease-ttl": self.settings.lease_ttl_s,
            "--ready-file": ready,
        }
        arguments = [str(part) for pair in (common | options).items() for part in pair]
        return _Member(name, module_command(module, *arguments), ready, self.log_directory / f"{name}.log")

    def _controller_member(self, port: int) -> _Member:
        options: dict[str, object] = {"--port": port, "--data-root": self.settings.data_root}
        if self.settings.settle_s is not None:
            options["--settle-s"] = self.settings.settle_s
        return self._member("controller", "controller", options)

    def _spawn_agent(self, name: str) -> None:
        options: dict[str, object] = {
            "--node": name,
            "--devices": f"{self.settings.device}:{self.settings.ranks_per_node}",
            "--state-dir": self.settings.state / "nodes" / name,
        }
        agent = self._member(name, "worker", options)
        self._agents[name] = agent
        agent.spawn()

    def _wait_ready(self, members: list[_Member]) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        waiting = list(members)
        while waiting:
            for member in list(waiting):
                if member.ready_file.exists():
                    waiting.remove(member)
                    self._on_progress(member.name)
                elif member.ended_with() is not None:
                    raise member.failure(f"ended with code {member.ended_with()} before it was ready")
            if time.monotonic() > deadline:
                raise waiting[0].failure(f"was not ready within {_READY_TIMEOUT_S:.0f} s")
            if waiting:
                time.sleep(_READY_POLL_S)


def _kill(member: _Member) -> float:
    """SIGKILL one process of the cluster; returns the wall-clock time of the kill."""
    process = member.process
    assert process is not None and process.poll() is None, f"{member.name} does not run"
    handle = os.pidfd_open(process.pid)  # not reaped yet, so the pid is its own
    try:
        at = time.time()
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)
    process.wait()
    return at


def _environment() -> dict[str, str]:
    """Ours, with one computing thread a rank and a name server that, if it is dead, costs one second and no more."""
    return {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", **os.environ}
