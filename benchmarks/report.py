"""What every benchmark says about itself: the machine, the versions, the date, the command; one JSON line last."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def header(*packages: str) -> dict[str, Any]:
    """Print where and with what this runs; returns it for the last line."""
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }
    for name, value in facts.items():
        print(f"{name}: {value}")
    return facts


def last_line(result: dict[str, Any]) -> None:
    """The one line that a program reads."""
    print(json.dumps(result), flush=True)
