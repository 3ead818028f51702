"""Small parts of the agent by themselves."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from engine.agent_link import AgentLink
from engine.planning.messages import EXIT_AGENT_SILENT, Ended, Failure, Hello, Progress
from everstep.protocol.keys import Keys
from everstep.protocol.messages import Heartbeat, NodeRecord, RankStatus
from everstep.protocol.store import Lease, Store, StoreError, StoreUnavailable
from tests.coroutines import in_event_loop, until
from worker import logs
from worker.local_rank import LocalRank, cause_of, tail
from worker.logs import rotate
from worker.outbox import Outbox
from worker.preflight import DeviceChoice, peak_flops_of
from worker.processes import Process, all_processes, is_ending, kill, look_up
from worker.rank_lines import RankLines
from worker.registration import Registration
from worker.state_dir import StateDir
from worker.warm_client import Ending

REPOSITORY = Path(__file__).parents[2]


def _rank(tmp_path: Path) -> LocalRank:
    return LocalRank(
        job="j", generation=2, rank=1, device=0, log=tmp_path / "log", rank_file=tmp_path / "r", start_step=5, since=0.0
    )


def _failure(at: float) -> Failure:
    return Failure(
        rank=1, generation=2, category="collective", error="RuntimeError", message="peer", traceback="", at=at
    )


def test_agent_and_line_to_it_import_no_torch() -> None:
    code = "import sys, worker.service, worker.agent, engine.agent_link; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


@pytest.mark.parametrize(
    ("ending", "failure", "complete", "stopped", "cause"),
    [
        (Ending(1, 0, None, False, 0.0), None, True, False, "ended well"),
        (Ending(1, None, 9, True, 0.0), None, False, True, "stopped by its agent"),
        (Ending(1, None, 9, False, 0.0), None, False, False, "killed by signal 9 (Killed), cause unknown"),
        (Ending(1, 10, None, False, 0.0), _failure(0.0), False, False, "RuntimeError: peer"),
        (Ending(1, 11, None, False, 0.0), None, False, False, "ended itself because its agent was silent"),
        (Ending(1, 0, None, False, 0.0), None, False, False, "ended with exit code 0 and left no record"),
    ],
)
def test_cause(ending: Ending, failure: Failure | None, complete: bool, stopped: bool, cause: str) -> None:
    assert cause_of(ending, failure, complete=complete, stopped_by_us=stopped) == cause


def test_failure_before_our_kill_stays_a_fault(tmp_path: Path) -> None:
    rank = _rank(tmp_path)
    rank.take(_failure(at=10.0), 10.0)
    rank.record_end(Ending(1, None, 9, True, 12.0), kill_began_at=11.0)
    assert rank.exit is not None and rank.exit.is_fault and rank.exit.cause == "RuntimeError: peer"


def test_failure_after_our_kill_is_a_consequence(tmp_path: Path) -> None:
    rank = _rank(tmp_path)
    rank.take(_failure(at=11.5), 11.5)
    rank.record_end(Ending(1, 10, None, True, 12.0), kill_began_at=11.0)
    assert rank.exit is not None and rank.exit.stopped_by_us and not rank.exit.is_fault


def test_ended_line_with_a_bad_exit_is_not_a_good_end(tmp_path: Path) -> None:
    rank = _rank(tmp_path)
    rank.take(Ended(rank=1, step=9, complete=True), 1.0)
    rank.record_end(Ending(1, None, 11, False, 1.0), kill_began_at=None)
    assert rank.exit is not None and rank.exit.is_fault


def test_news_are_phase_changes_and_the_first_step(tmp_path: Path) -> None:
    rank = _rank(tmp_path)
    lines = [("meeting", 5), ("restoring", 5), ("restoring", 5), ("stepping", 5), ("stepping", 6), ("stepping", 7)]
    news = [
        rank.take(Progress.model_validate({"rank": 1, "phase": phase, "step": step, "at": 0.0}), 1.0)
        for phase, step in lines
    ]
    assert news == [True, True, False, True, True, False]


def test_tail_gives_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_bytes(b"\xff\n" * 10_000 + b"".join(b"line %d\n" % number for number in range(30)))
    assert tail(log).splitlines() == [f"line {number}" for number in range(10, 30)]


def test_rotation_keeps_the_writer_going(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        assert not rotate(log, largest_bytes=100)
        writer.write(b"y")
        assert rotate(log, largest_bytes=100)
        writer.write(b"after")
    assert log.read_bytes() == b"after"
    assert (tmp_path / "log.1").read_bytes() == b"x" * 100 + b"y"


def test_device_choice() -> None:
    assert DeviceChoice.parse("cpu:2") == DeviceChoice(kind="cpu", num_devices=2)
    assert DeviceChoice.parse("cuda") == DeviceChoice(kind="cuda", num_devices=None)
    assert DeviceChoice.parse("cuda:4") == DeviceChoice(kind="cuda", num_devices=4)
    for wrong in ("cpu", "cpu:0", "cpu:-1", "tpu:1", "", "cuda:", "cpu:2:3"):
        with pytest.raises(ValueError, match="devices"):
            DeviceChoice.parse(wrong)


def test_peak_by_name() -> None:
    assert peak_flops_of("NVIDIA H200") == 989e12
    assert peak_flops_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops_of("NVIDIA L4") == 121e12
    assert peak_flops_of("Unheard Of 3000") == 0.0


class _Etcd:
    """A store of which the test says whether it is there."""

    def __init__(self) -> None:
        self.away = True
        self.written: list[tuple[str, bytes]] = []

    async def put(self, key: str, value: bytes) -> int:
        await asyncio.sleep(0)
        if self.away:
            raise StoreUnavailable("away")
        if key == "bad":
            raise StoreError("refused")
        self.written.append((key, value))
        return 1


@in_event_loop
async def test_outbox_keeps_the_newest_value_until_etcd_is_there() -> None:
    etcd = _Etcd()
    outbox = Outbox(cast(Store, etcd))
    sending = asyncio.create_task(outbox.run())
    outbox.put("a", b"1")
    outbox.put("bad", b"1")
    outbox.put("b", b"1")
    outbox.put("a", b"2")
    assert not await outbox.drained(0.05)
    etcd.away = False
    assert await outbox.drained(2.0)
    assert etcd.written == [("a", b"2"), ("b", b"1")]
    sending.cancel()


def test_process_table_finds_and_kills_exactly() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as child:
        process = look_up(child.pid)
        assert process is not None
        assert (process.parent, process.session, process.group) == (os.getpid(), child.pid, child.pid)
        assert process in all_processes() or look_up(child.pid) is not None
        older = Process(**{**vars(process), "start_time": process.start_time - 1})
        kill(older)
        time.sleep(0.05)
        assert child.poll() is None
        kill(process)
        assert child.wait() == -signal.SIGKILL
    kill(process)
    assert look_up(child.pid) is None


def test_leftovers_of_an_earlier_agent_are_ended(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.create()
    name = state.rank_file("j", 1, 0)
    reused = state.rank_file("j", 1, 1)
    torn = state.rank_file("j", 1, 2)
    torn.write_text('{"pid": 12')
    with (
        subprocess.Popen(["sleep", "60"], start_new_session=True) as leader,
        subprocess.Popen(
            ["sleep", "60"], start_new_session=True, env={**os.environ, "EVERSTEP_OWNER": str(name)}
        ) as escaped,
        subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger,
    ):
        found = look_up(leader.pid)
        assert found is not None
        name.write_text(json.dumps({"pid": leader.pid, "start_time": found.start_time}))
        # A pid that belongs to somebody else by now.
        reused.write_text(json.dumps({"pid": stranger.pid, "start_time": 1}))
        assert state.end_leftovers(2.0) == []
        assert leader.wait() == escaped.wait() == -signal.SIGKILL
        assert stranger.poll() is None
        stranger.kill()
    assert not list(state.ranks.iterdir())


def _in_child(line: socket.socket, agents_end: socket.socket, silence_limit_s: float) -> int:
    """Fork a process that only waits, on an AgentLink; returns its pid."""
    pid = os.fork()
    if pid == 0:
        agents_end.close()
        AgentLink(line, silence_limit_s)
        time.sleep(20)
        os._exit(1)
    line.close()
    return pid


def test_rank_ends_itself_when_its_agent_is_silent() -> None:
    ours, theirs = socket.socketpair()
    began = time.monotonic()
    pid = _in_child(theirs, ours, 0.3)
    for _ in range(4):
        time.sleep(0.1)
        ours.sendall(b'{"kind": "ping"}\n')
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == EXIT_AGENT_SILENT
    assert 0.6 < time.monotonic() - began < 1.5
    ours.close()


def test_rank_ends_itself_when_its_agent_hangs_up() -> None:
    ours, theirs = socket.socketpair()
    pid = _in_child(theirs, ours, 30.0)
    ours.close()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == EXIT_AGENT_SILENT


def test_without_an_agent_messages_are_dropped() -> None:
    link = AgentLink(None, 1.0)
    link.send(Ended(rank=0, step=1, complete=True))
    assert link.stop_requested is None
    link.close()


@in_event_loop
async def test_stranger_under_a_ranks_name_is_turned_away(tmp_path: Path) -> None:
    lines = RankLines(
        tmp_path / "s",
        beat=lambda: None,
        committed=lambda record: None,
        save_failed=lambda job, failed: None,
        now=time.time,
    )
    await lines.start()
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    rank = _rank(tmp_path)
    rank.pid = os.getpid() + 1
    rank.forked.set()
    lines.expect(rank)
    for hello in (
        Hello(job="j", generation=2, rank=1, pid=rank.pid).model_dump_json(),
        Hello(job="j", generation=3, rank=1, pid=os.getpid()).model_dump_json(),
        Ended(rank=1, step=1, complete=True).model_dump_json(),
        "nonsense",
    ):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(hello.encode() + b"\n")
        assert await asyncio.wait_for(reader.read(), 1.0) == b""
        writer.close()
    assert rank.ended is None
    lines.close()


@in_event_loop
async def test_a_full_disk_does_not_end_the_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def full(log: Path) -> bool:
        tried.append(log)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logs, "rotate", full)
    monkeypatch.setattr(logs, "_LOOK_S", 0.01)
    task = asyncio.create_task(logs.keep_rotating(lambda: [tmp_path / "log"]))
    await until(lambda: len(tried) > 2)
    task.cancel()


def test_a_log_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert "cannot be read" in tail(tmp_path)


def _record(port: int = 1, incarnation: str = "ours") -> NodeRecord:
    return NodeRecord(
        node="n",
        incarnation=incarnation,
        host="127.0.0.1",
        port=port,
        meeting_port=1,
        devices=(),
        pid=1,
        started_at=0.0,
    )


@in_event_loop
async def test_a_stranger_at_the_port_of_the_names_holder_ends_nothing() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    holder = _record(server.sockets[0].getsockname()[1], "theirs")
    registration = Registration(cast(Store, None), Keys(), _record(), "t" * 16, 2, statuses=lambda: ())
    assert not await registration._may_replace(holder)
    server.close()


class _BeatenStore:
    """Takes heartbeats, a little late."""

    def __init__(self) -> None:
        self.beats: list[tuple[float, Heartbeat]] = []

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        await asyncio.sleep(0.02)
        self.beats.append((time.monotonic(), Heartbeat.model_validate_json(value)))
        return 1


@in_event_loop
async def test_progress_shows_every_second_whatever_else_is_told() -> None:
    """Beats for news put off the next regular one; each tells how far the ranks are by then."""
    store, began = _BeatenStore(), time.monotonic()

    def statuses() -> tuple[RankStatus, ...]:
        step = int((time.monotonic() - began) * 100)
        return (
            RankStatus(job="j", generation=1, rank=0, device=0, pid=1, phase="stepping", step=step, since=time.time()),
        )

    registration = Registration(cast(Store, store), Keys(), _record(), "t" * 16, 2, statuses=statuses)
    registration._lease = cast(Lease, SimpleNamespace(id=1))
    task = asyncio.create_task(registration.keep_beating())
    for pause_s in (0.7, 0.7, 1.2):
        await asyncio.sleep(pause_s)
        registration.beat()
    task.cancel()
    times = [began, *(at for at, _ in store.beats)]
    assert max(after - before for before, after in itertools.pairwise(times)) < 1.1
    assert all(beat.ranks[0].step > (at - began) * 100 - 10 for at, beat in store.beats)


def test_a_process_with_a_sigkill_on_its_way_is_ending_and_a_stopped_one_is_not():
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert not is_ending(process.pid)
        process.send_signal(signal.SIGSTOP)
        assert not is_ending(process.pid)
        process.send_signal(signal.SIGKILL)
        assert is_ending(process.pid)
    finally:
        process.kill()
        process.wait()
    assert is_ending(process.pid)
