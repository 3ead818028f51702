"""What a rank process does between the fork and its entry point: become its own, tie itself to its parent, redirect."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from engine.planning.messages import RankLaunch
from worker.processes import OWNER_VARIABLE, close_files_above, die_with_parent, look_up, set_name


def leave_parent(parent: int, name: str) -> None:
    """First thing in every process that the warm parent forks: own session, tied to the parent, nothing inherited."""
    os.setsid()
    die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    set_name(name)


def become_rank(
    parent: int, launch_json: str, log: Path, rank_file: Path, entry: Callable[[RankLaunch], int]
) -> NoReturn:
    """Run ``entry`` as a rank in this freshly forked process and end with its exit code. Never returns.

    An exception that ``entry`` lets out goes to the log and gives exit code 1.
    """
    code = 1
    try:
        launch = RankLaunch.model_validate_json(launch_json)
        leave_parent(parent, f"es:g{launch.generation}r{launch.rank}")
        own = look_up(os.getpid())
        assert own is not None
        rank_file.write_text(json.dumps({"pid": own.pid, "start_time": own.start_time}))
        _redirect(log)
        os.environ.update(
            {
                OWNER_VARIABLE: str(rank_file),
                "EVERSTEP_JOB": launch.job,
                "EVERSTEP_GENERATION": str(launch.generation),
                "EVERSTEP_RANK": str(launch.rank),
                "OMP_NUM_THREADS": str(launch.num_threads),
            }
        )
        _use_threads(launch.num_threads)
        code = entry(launch)
    except SystemExit as request:
        code = _exit_code(request.code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: Path) -> None:
    source = os.open(os.devnull, os.O_RDONLY)
    # Appending, so that the agent may cut the file short while it is written.
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(source, 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    close_files_above(2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _use_threads(number: int) -> None:
    import torch

    torch.set_num_threads(number)


def _exit_code(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    print(value, file=sys.stderr)
    return 1
