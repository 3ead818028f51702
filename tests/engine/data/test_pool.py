"""Worker processes: results in order, memory bounded, a death told at once, nobody left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from engine.data.pool import OrderedPool, WorkerError
from tests.engine.data import pool_work


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("num_workers", [1, 3])
def test_results_keep_their_order(num_workers):
    with OrderedPool(num_workers, pool_work.squaring, 4) as pool:
        assert list(pool.map(range(40))) == [i * i for i in range(40)]
        assert list(pool.map([])) == []
        assert list(pool.map([3])) == [9], "a pool can be used again"
        pids = pool.pids
    assert len(pids) == num_workers
    assert all(gone(pid) for pid in pids)


def test_reading_stays_a_window_ahead_of_what_was_taken():
    asked = 0

    def items():
        nonlocal asked
        while asked < 100:
            asked += 1
            yield asked

    with OrderedPool(2, pool_work.echoing) as pool:
        for given, _ in enumerate(pool.map(items()), start=1):
            assert asked <= given + 8
    assert asked == 100


def test_items_and_results_larger_than_any_pipe_buffer():
    big = [bytes([i]) * 3_000_000 for i in range(6)]
    with OrderedPool(2, pool_work.echoing) as pool:
        assert list(pool.map(big)) == big


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_worker_that_is_killed_at_work_is_an_error_at_once(num_workers):
    begin = time.monotonic()
    with OrderedPool(num_workers, pool_work.dying_at, 7) as pool:
        with pytest.raises(WorkerError, match=r"worker process \d+ died by signal 9"):
            list(pool.map(range(1000)))
        pids = pool.pids
    assert time.monotonic() - begin < 10
    assert all(gone(pid) for pid in pids)


def test_an_idle_worker_that_is_killed_is_an_error_too():
    with OrderedPool(2, pool_work.echoing) as pool:
        results = pool.map(iter(range(1000)))
        next(results)
        os.kill(pool.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match="died by signal 9"):
            list(results)


def test_an_exception_in_a_worker_comes_with_its_traceback():
    with OrderedPool(2, pool_work.raising_at, 5) as pool, pytest.raises(WorkerError, match="ZeroDivisionError: the fa"):
        list(pool.map(range(100)))


def test_a_worker_that_cannot_start_tells_why():
    with OrderedPool(2, pool_work.never_starting) as pool, pytest.raises(WorkerError, match="nothing to start from"):
        list(pool.map(range(100)))


def test_an_error_of_the_source_ends_the_workers():
    def items():
        yield 1
        raise OSError("the disk is gone")

    with OrderedPool(2, pool_work.echoing) as pool:
        pids = pool.pids
        with pytest.raises(OSError, match="the disk is gone"):
            list(pool.map(items()))
        pool.close()
    assert all(gone(pid) for pid in pids)
