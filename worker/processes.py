"""Processes as the kernel knows them: who dies with whom, who belongs to which session, and killing exactly those.

A process is named by its pid and its start time, because pids are used again. No torch here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

OWNER_VARIABLE = "EVERSTEP_OWNER"
"""Environment variable by which programs that a rank starts are known to be its own: the path of its rank file."""

_PF_EXITING = 4  # include/linux/sched.h
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | bytes) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when ``parent`` dies; end at once if it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Become the parent of descendants whose own parent died, so that they can be waited for."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def close_files_above(last: int) -> None:
    """Close every file descriptor above ``last``; only what is open, whatever the limit is."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        if (number := int(entry.name)) > last:
            # The one that listed the directory is closed already.
            with contextlib.suppress(OSError):
                os.close(number)


def set_name(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show (15 bytes of it)."""
    _prctl(_PR_SET_NAME, name.encode()[:15] + b"\0")


@dataclass(frozen=True)
class Process:
    """One line of the process table. ``start_time`` is in clock ticks since boot."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start_time: int

    @property
    def dead(self) -> bool:
        """Whether only its entry is left (it waits to be reaped)."""
        return self.state in "ZX"


def look_up(pid: int) -> Process | None:
    """The process with this pid, if there is one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may hold anything, parentheses and spaces too.
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(
        pid=pid,
        state=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        start_time=int(fields[19]),
    )


def is_ending(pid: int) -> bool:
    """Whether a process is on its way out for a reason of its own: it exits, or a SIGKILL is pending already.

    A process with much memory takes some milliseconds from the signal to the entry that can be reaped.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return bool(int(fields[6]) & _PF_EXITING) or any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)


def all_processes() -> list[Process]:
    """Every process that can be seen."""
    found = (look_up(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [process for process in found if process is not None]


def kill(process: Process) -> None:
    """SIGKILL exactly this process: nothing happens when its pid belongs to another one by now."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        now = look_up(process.pid)
        if now is not None and now.start_time == process.start_time:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def owner(process: Process) -> str | None:
    """The rank that a program belongs to, by the environment it was started with; None when that cannot be told."""
    try:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return None
    marker = f"{OWNER_VARIABLE}=".encode()
    return next((item[len(marker) :].decode() for item in environment.split(b"\0") if item.startswith(marker)), None)


def family(leader: int, start_time: int, name: str) -> list[Process]:
    """Living processes of the session that ``leader`` (with this start time) founded, and those that ``name`` owns.

    The kernel does not give a pid away while it still names a session, so a leader with another start time means that
    the session is empty.
    """
    now = look_up(leader)
    session_lives = now is None or now.start_time == start_time
    living = [process for process in all_processes() if not process.dead]
    return [process for process in living if (session_lives and process.session == leader) or owner(process) == name]


def end_family(leader: int, start_time: int, name: str, timeout_s: float) -> bool:
    """SIGKILL a rank's ``family`` until none is left; False when some outlast ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while members := family(leader, start_time, name):
        for process in members:
            kill(process)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
