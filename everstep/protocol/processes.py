"""Start programs that cannot outlive their parent, and end them for certain. A process is its pid, never a name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from everstep.protocol import exec_tied
from everstep.protocol.exec_tied import die_with_parent

__all__ = ["die_with_parent", "ended", "spawn", "terminate"]


def spawn(
    argv: Sequence[str],
    *,
    log_path: Path | str,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    pass_fds: Sequence[int] = (),
    die_with_parent: bool = True,
) -> subprocess.Popen[bytes]:
    """Start a program in its own session, its output appended to ``log_path``, its input empty.

    With ``die_with_parent`` the kernel kills it with SIGKILL when this process ends, however that happens. The kernel
    watches the *thread* that started it, so such programs are started by the main thread alone. What the program itself
    starts is not covered: each such child asks for itself.

    ``env`` replaces the whole environment. Raises FileNotFoundError when the program does not exist.
    """
    program = shutil.which(argv[0], path=None if env is None else env.get("PATH"))
    if program is None:
        raise FileNotFoundError(f"no such program: {argv[0]}")
    command = [str(Path(program).absolute()), *argv[1:]]
    if die_with_parent:
        assert threading.current_thread() is threading.main_thread(), "the child would die with this thread"
        command = [sys.executable, "-I", "-S", exec_tied.__file__, str(os.getpid()), *command]
    log_path = Path(log_path)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
        )


async def ended(process: subprocess.Popen[bytes]) -> int:
    """Wait, without a thread or polling, until ``process`` has ended; returns its return code (-N: signal N)."""
    if process.poll() is not None:
        return process.returncode
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    pidfd = os.pidfd_open(process.pid)
    try:
        loop.add_reader(pidfd, done.set)
        try:
            await done.wait()
        finally:
            loop.remove_reader(pidfd)
    finally:
        os.close(pidfd)
    return process.wait()


def terminate(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """End ``process``: SIGTERM, after ``grace_s`` SIGKILL; then SIGKILL to whatever is left of its process group.

    ``process`` must lead its own group, as those of ``spawn`` do. Blocks until it has been reaped; returns its return
    code (-N: ended by signal N). A process that has been reaped already is left alone, group and all, because its pid
    may belong to somebody else by now.
    """
    if process.returncode is not None:
        return process.returncode
    pidfd = os.pidfd_open(process.pid)  # not reaped, so the pid is still its own
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if not _readable(pidfd, grace_s):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            _readable(pidfd, None)
        # Dead but not reaped: neither its pid nor its group's number can have been given to anybody else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    finally:
        os.close(pidfd)
    return process.wait()


def _readable(pidfd: int, timeout_s: float | None) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))
