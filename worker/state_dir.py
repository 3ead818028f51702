"""What an agent keeps on disk: its lock, its socket, a file for each running rank, logs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from worker.processes import end_family

_LONGEST_SOCKET_PATH = 100


class StateDirBusy(Exception):
    """Another agent uses this state directory."""


@dataclass(frozen=True)
class StateDir:
    """Paths below one agent's state directory."""

    root: Path

    @property
    def ranks(self) -> Path:
        """One file for each rank that runs: pid and start time."""
        return self.root / "ranks"

    @property
    def warm_parent_log(self) -> Path:
        """Output of the warm parent."""
        return self.root / "logs" / "warm-parent.log"

    @property
    def socket(self) -> Path:
        """Socket that the ranks report to. In the temporary directory when the state directory's path is too long."""
        usual = self.root / "agent.sock"
        if len(os.fsencode(usual)) <= _LONGEST_SOCKET_PATH:
            return usual
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"everstep-{os.geteuid()}-{digest}" / "agent.sock"

    def rank_file(self, job: str, generation: int, rank: int) -> Path:
        """Where a rank's pid and start time are kept while it runs."""
        return self.ranks / f"{job}.g{generation}.r{rank}"

    def rank_log(self, job: str, generation: int, rank: int) -> Path:
        """Output of one rank."""
        return self.root / "logs" / job / f"g{generation}-r{rank}.log"

    def create(self) -> None:
        """Make the directories. Raises PermissionError when the socket's directory belongs to somebody else."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.ranks.mkdir(exist_ok=True)
        self.warm_parent_log.parent.mkdir(exist_ok=True)
        folder = self.socket.parent
        if folder != self.root:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(f"{folder} must be a directory of ours with mode 0700")

    def lock(self, timeout_s: float) -> int:
        """Take the directory for this process and its forks; returns the lock's descriptor.

        An agent that was killed leaves its guardian behind for a moment, which shares the lock until it has cleaned up.
        Raises StateDirBusy when the lock is not free within ``timeout_s``.
        """
        handle = os.open(self.root / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return handle
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(handle)
                    raise StateDirBusy(f"{self.root} is used by another agent") from None
                time.sleep(0.02)

    def end_leftovers(self, timeout_s: float) -> list[str]:
        """End whatever is left of ranks whose agent is gone; returns the names of those that would not go."""
        stubborn = []
        for path in sorted(self.ranks.iterdir()):
            try:
                record = json.loads(path.read_text())
            except (ValueError, FileNotFoundError):
                # Cut short: the rank was killed while it wrote its first line, so it has started nothing.
                path.unlink(missing_ok=True)
                continue
            if end_family(record["pid"], record["start_time"], str(path), timeout_s):
                path.unlink(missing_ok=True)
            else:
                stubborn.append(path.name)
        return stubborn

    def remove_socket(self) -> None:
        """Remove the socket, and its directory when it is not the state directory itself."""
        self.socket.unlink(missing_ok=True)
        if self.socket.parent != self.root and self.socket.parent.is_dir():
            self.socket.parent.rmdir()
