"""The copy that a background save reads, and the thread that works beside training."""

import threading

import pytest
import torch

from engine.checkpoint.background import BackgroundWorker
from engine.checkpoint.host_copy import HostCopy
from engine.planning.layout import Layout
from tests.engine.checkpoint.synthetic import assert_right, filled, pieces_of


def test_the_copy_keeps_the_values_of_its_moment():
    pieces = filled(pieces_of(Layout(tp=2, dp=2), 3, uneven=True))
    copy = HostCopy(pieces)
    taken = copy.take()
    for piece in pieces:
        piece.data.zero_()
    owned = [piece for piece in taken if piece.owned]
    assert owned and len(taken) == len(pieces)
    assert_right(owned)
    assert [(p.name, p.box, p.dtype, p.owned) for p in taken] == [(p.name, p.box, p.dtype, p.owned) for p in pieces]


def test_every_copy_uses_the_same_memory():
    pieces = filled(pieces_of(Layout(), 0))
    copy = HostCopy(pieces)
    first = {piece.data.data_ptr() for piece in copy.take() if piece.owned}
    assert first == {piece.data.data_ptr() for piece in copy.take() if piece.owned}
    size = sum(piece.data.numel() * piece.dtype.itemsize for piece in pieces if piece.owned)
    assert size <= copy.num_bytes < size + 64 * len(pieces)


def test_no_room_for_the_copy_is_a_memory_error(monkeypatch):
    def full(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    pieces = pieces_of(Layout(), 0)
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(MemoryError, match="no room for a copy of the state"):
        HostCopy(pieces)


def test_the_worker_hands_errors_to_whoever_waits_and_ends_when_closed():
    before = threading.active_count()
    worker = BackgroundWorker("test")
    done = []
    for number in range(3):
        worker.start(lambda number=number: done.append((number, threading.current_thread().name)))
        worker.wait()
    assert done == [(0, "test"), (1, "test"), (2, "test")]
    assert threading.active_count() == before + 1

    def fail():
        raise OSError(5, "Input/output error")

    worker.start(fail)
    for ask in (worker.wait, worker.wait, worker.close):
        with pytest.raises(OSError, match="Input/output error"):
            ask()
    assert isinstance(worker.error, OSError)
    assert threading.active_count() == before


def test_closing_waits_for_the_work_under_way():
    release, done = threading.Event(), []
    worker = BackgroundWorker("test")
    worker.start(lambda: done.append(release.wait(timeout=10)))
    threading.Timer(0.05, release.set).start()
    worker.close()
    assert done == [True]
    BackgroundWorker("never used").close()
