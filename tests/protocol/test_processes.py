"""Programs that end with their parent, and programs that are ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from everstep.protocol.processes import ended, spawn, terminate
from tests.audit import processes_with


def wait_for(condition: object, timeout_s: float = 5.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def test_a_program_gets_its_own_session_no_input_and_a_log(tmp_path: Path) -> None:
    code = (
        "import os, sys; print(os.getpid(), os.getsid(0), repr(sys.stdin.read()), os.environ.get('WORD'), flush=True);"
        "print('to stderr', file=sys.stderr)"
    )
    log = tmp_path / "logs" / "a.log"
    for die_with_parent in (True, False):
        process = spawn([sys.executable, "-c", code], log_path=log, env={"WORD": "w"}, die_with_parent=die_with_parent)
        assert process.wait(10) == 0
        assert log.read_text() == f"{process.pid} {process.pid} '' w\nto stderr\n"
        log.unlink()


def test_a_child_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    """The parent gets SIGKILL, so nothing that it could have done for its child ran."""
    marker = f"EVERSTEP_TEST={os.getpid()}-{time.monotonic_ns()}"
    parent_code = (
        "import sys, time\nfrom everstep.protocol.processes import spawn\n"
        "spawn(['sleep', '60'], log_path=sys.argv[1])\nprint('started', flush=True)\ntime.sleep(60)"
    )
    name, value = marker.split("=")
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code, str(tmp_path / "child.log")],
        stdout=subprocess.PIPE,
        env={**os.environ, name: value},
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    wait_for(lambda: any(command.endswith("sleep 60") for command in processes_with(marker).values()))
    assert len(processes_with(marker)) == 2
    parent.kill()
    parent.wait()
    wait_for(lambda: not processes_with(marker), 2.0)
    parent.stdout.close()


def test_a_parent_that_is_gone_already_is_noticed(tmp_path: Path) -> None:
    from everstep.protocol import exec_tied

    no_parent_of_ours = "1"
    process = subprocess.run(
        [sys.executable, "-I", "-S", exec_tied.__file__, no_parent_of_ours, "/bin/echo", "ran"], capture_output=True
    )
    assert process.returncode == -signal.SIGKILL
    assert process.stdout == b""


def test_only_the_main_thread_may_start_what_dies_with_it(tmp_path: Path) -> None:
    errors = []

    def start() -> None:
        try:
            spawn(["sleep", "1"], log_path=tmp_path / "log")
        except AssertionError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        spawn(["no-such-program"], log_path=tmp_path / "log")


def test_terminate_asks_first(tmp_path: Path) -> None:
    process = spawn(["sleep", "60"], log_path=tmp_path / "log")
    wait_for(lambda: b"sleep" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
    assert terminate(process, 5.0) == -signal.SIGTERM
    assert terminate(process, 5.0) == -signal.SIGTERM


def test_terminate_kills_who_does_not_listen_and_its_group(tmp_path: Path) -> None:
    marker = f"EVERSTEP_TEST={os.getpid()}-{time.monotonic_ns()}"
    name, value = marker.split("=")
    process = spawn(
        ["sh", "-c", "trap '' TERM; sleep 60 & echo ready; wait; sleep 60"],
        log_path=tmp_path / "log",
        env={**os.environ, name: value},
    )
    wait_for(lambda: (tmp_path / "log").read_text() == "ready\n")
    wait_for(lambda: len(processes_with(marker)) == 2)
    began = time.monotonic()
    assert terminate(process, 0.2) == -signal.SIGKILL
    assert time.monotonic() - began < 1.0
    wait_for(lambda: not processes_with(marker), 1.0)


def test_ended_waits_in_an_event_loop(tmp_path: Path) -> None:
    async def run() -> None:
        process = spawn(["sleep", "60"], log_path=tmp_path / "log")
        waiting = asyncio.create_task(ended(process))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        process.kill()
        assert await asyncio.wait_for(waiting, 2.0) == -signal.SIGKILL
        assert await ended(process) == -signal.SIGKILL

    asyncio.run(run())
