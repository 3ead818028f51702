"""Who is still alive: finds processes by a variable in the environment that they were started with."""

from __future__ import annotations

from pathlib import Path


def processes_with(marker: str) -> dict[int, str]:
    """Pid and command line of every live process whose initial environment contains ``marker`` (KEY=VALUE).

    Forked children count (they carry the environment on), zombies do not.
    """
    found = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            environment = (directory / "environ").read_bytes()
            command = (directory / "cmdline").read_bytes()
        except OSError:  # it has ended, or belongs to somebody else
            continue
        if marker.encode() in environment.split(b"\0"):
            found[int(directory.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found
