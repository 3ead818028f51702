"""A save that dies or fails leaves nothing that looks complete, and every rank learns of it."""

import errno
import os
import resource
import time

import pytest
import torch

from engine.checkpoint import save as save_module
from engine.checkpoint.boxes import Box
from engine.checkpoint.catalog import directory_name, list_checkpoints, newest, prune
from engine.checkpoint.errors import CheckpointSaveError, CheckpointSuperseded
from engine.checkpoint.load import load_checkpoint
from engine.checkpoint.pieces import Piece
from engine.checkpoint.save import save_checkpoint
from engine.failure import categorise
from engine.groups import CollectiveError
from engine.planning.layout import Layout
from engine.planning.messages import GenerationStart
from tests.engine.checkpoint.synthetic import (
    RUN,
    assert_right,
    filled,
    good,
    load_all,
    pieces_of,
    run_threads,
    save_all,
    whole,
)
from tests.harness import groups_of, run_ranks

PAIR = Layout(tp=2)


def save(directory, pieces, group, layout=PAIR, step=20, generation=1, **more):
    return save_checkpoint(
        pieces, directory, group, job="job", generation=generation, step=step, run=RUN, layout=layout, **more
    )


@pytest.fixture
def older(tmp_path):
    """A complete checkpoint of step 10."""
    return save_all(tmp_path / "checkpoints", PAIR, [filled(pieces_of(PAIR, rank)) for rank in range(2)], step=10)


def assert_only(older):
    """``older`` is the newest checkpoint, whole, and nothing else is there."""
    directory = older.parent
    assert [e.directory for e in list_checkpoints(directory)] == [older]
    assert [p.name for p in directory.iterdir()] == [older.name]
    states = [pieces_of(Layout(dp=2), rank) for rank in range(2)]
    good(load_all(older, states))
    for pieces in states:
        assert_right(pieces)


def _real_ranks(rank, store, layout, directory):
    groups = groups_of(layout, rank, store)
    saved = save(directory, filled(pieces_of(layout, rank)), groups.world, layout)
    fresh = pieces_of(layout, rank)
    result = load_checkpoint(fresh, saved.directory, groups.world)
    assert_right(fresh)
    return str(saved.directory), saved.num_bytes, result.bytes_needed, result.bytes_read


def test_real_ranks_save_and_load(tmp_path):
    layout = Layout(tp=2, pp=2)
    results = run_ranks(4, _real_ranks, layout, tmp_path)
    assert {r[:2] for r in results} == {(str(tmp_path / directory_name(20, 1)), results[0][1])}
    states = [pieces_of(Layout(pp=3), rank) for rank in range(3)]
    good(load_all(tmp_path / directory_name(20, 1), states))
    for pieces in states:
        assert_right(pieces)


def _die_at(rank, store, directory, call, number):
    """One rank of a save ends, without a word, in a call of ``os.<call>``; returns what the other one saw.

    Positive numbers: the n-th call of rank 1. Negative: of rank 0, which also publishes.
    """
    groups = groups_of(PAIR, rank, store, timeout_s=10.0)
    victim = 0 if number < 0 else 1
    count = 0
    original = getattr(os, call)

    def dying(*args, **kwargs):
        nonlocal count
        count += 1
        if count == abs(number):
            if call == "write":
                original(args[0], bytes(args[1])[: len(args[1]) // 2])
            os._exit(0)
        return original(*args, **kwargs)

    if rank == victim:
        setattr(os, call, dying)
    try:
        save(directory, filled(pieces_of(PAIR, rank)), groups.world)
    except CollectiveError:
        return "lost its peer"
    return "saved"


@pytest.mark.parametrize(
    ("call", "number"),
    [("write", 1), ("write", 7), ("fsync", 1), ("fsync", 2), ("write", -3), ("mkdir", -1), ("rename", -1)]
    + [("fsync", -n) for n in (1, 2, 3, 4, 5)],
)
def test_killed_in_the_middle_the_older_one_stays_the_newest(older, call, number):
    """SIGKILL-like ends in writing, before and after each fsync, and right before the rename."""
    directory = older.parent
    with pytest.raises(AssertionError, match="ended without a result"):
        run_ranks(2, _die_at, directory, call, number, timeout_s=30)
    left = directory / directory_name(20, 1)
    assert newest(directory).directory == older
    assert not (left / "manifest.json").exists()
    # A later generation clears it away; so does a new save of the same name.
    prune(directory, 1, [GenerationStart(generation=2, start_step=10)])
    assert_only(older)


def test_killed_right_after_the_rename_it_is_complete(older):
    with pytest.raises(AssertionError, match="ended without a result"):
        run_ranks(2, _die_at, older.parent, "fsync", -6, timeout_s=30)
    found = newest(older.parent)
    assert found is not None and found.step == 20
    pieces = pieces_of(Layout(), 0)
    good(load_all(found.directory, [pieces]))
    assert_right(pieces)


def test_a_leftover_is_replaced_and_a_complete_checkpoint_is_not(older):
    directory = older.parent
    left = directory / directory_name(20, 1)
    left.mkdir()
    (left / "shard-00000.safetensors").write_bytes(b"half")
    (left / "shard-00077.safetensors").write_bytes(b"of a wider layout")
    states = [filled(pieces_of(PAIR, rank)) for rank in range(2)]
    assert save_all(directory, PAIR, states, step=20) == left
    assert sorted(p.name for p in left.iterdir()) == [
        "manifest.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    before = {p: p.read_bytes() for p in left.iterdir()}
    for result in run_threads(2, lambda rank, group: save(directory, states[rank], group)):
        assert isinstance(result, CheckpointSaveError) and "complete checkpoint" in result.reason
    assert {p: p.read_bytes() for p in left.iterdir()} == before


def _fails(rank, store, directory, call, number, failing_rank):
    """The ``number``-th ``os.<call>`` of one rank raises EIO; return what this rank's save raised."""
    groups = groups_of(PAIR, rank, store)
    count = 0
    original = getattr(os, call)

    def failing(*args, **kwargs):
        nonlocal count
        count += 1
        if count == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*args, **kwargs)

    if rank == failing_rank:
        setattr(os, call, failing)
    try:
        save(directory, filled(pieces_of(PAIR, rank)), groups.world)
    except CheckpointSaveError as error:
        assert categorise(error, stepped=True) == ("internal" if rank == failing_rank else "collective")
        return error.file, error.reason, error.errno
    return None


@pytest.mark.parametrize(
    ("call", "number", "rank"), [("write", 5, 1), ("fsync", 1, 1), ("fsync", 2, 0), ("fsync", 4, 0), ("fsync", 6, 0)]
)
def test_an_input_output_error_on_one_rank_fails_the_save_on_all(older, call, number, rank):
    results = run_ranks(2, _fails, older.parent, call, number, rank)
    assert results[0] == results[1]
    file, reason, number = results[0]
    assert number == errno.EIO and "error" in reason
    assert file.startswith(str(older.parent / directory_name(20, 1)))
    assert_only(older)


def _disk_full(rank, store, directory):
    """This rank may write no file beyond 64 KiB."""
    groups = groups_of(PAIR, rank, store)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, resource.RLIM_INFINITY))
    box = Box((rank, 0), (1, 1 << 16))
    state = [Piece("weight/x", (2, 1 << 16), torch.float32, box, torch.ones(box.size))]
    began = time.monotonic()
    try:
        save(directory, state, groups.world)
    except CheckpointSaveError as error:
        first = (error.file, error.errno)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    groups.world.barrier()
    left = sorted(p.name for p in directory.iterdir())
    groups.world.barrier()
    saved = save(directory, state, groups.world, step=30)
    return *first, left, time.monotonic() - began, saved.directory.name


def test_a_full_disk_fails_the_save_on_all_ranks_and_the_next_one_succeeds(older):
    for file, number, left, seconds, later in run_ranks(2, _disk_full, older.parent):
        assert file == str(older.parent / directory_name(20, 1) / "shard-00001.safetensors")
        assert number == errno.EFBIG
        assert left == [older.name]
        assert seconds < 10
        assert later == directory_name(30, 1)


def test_a_directory_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    for result in run_threads(2, lambda rank, group: save(tmp_path / "file", filled(pieces_of(PAIR, rank)), group)):
        assert isinstance(result, CheckpointSaveError) and result.errno == errno.ENOTDIR


def test_a_ghost_publishes_nothing(older):
    def ghost(rank, group):
        return save(older.parent, filled(pieces_of(PAIR, rank)), group, still_current=lambda: False)

    for result in run_threads(2, ghost):
        assert isinstance(result, CheckpointSuperseded)
    assert_only(older)


def test_boxes_that_do_not_make_up_the_tensors_are_refused(older):
    def with_a_hole(rank, group):
        return save(
            older.parent, [p for p in filled(pieces_of(PAIR, rank)) if rank == 0 or "gate" not in p.name], group
        )

    def twice(rank, group):
        return save(older.parent, filled([whole("weight/x", (3,))]), group)

    for result in run_threads(2, with_a_hole):
        assert isinstance(result, CheckpointSaveError) and "weight/layers.0.gate: [12:24, 0:16] is not stored" in str(
            result
        )
    for result in run_threads(2, twice):
        assert isinstance(result, CheckpointSaveError) and "weight/x: a box is stored twice" in str(result)
    assert_only(older)


def test_an_unexpected_error_on_one_rank_reaches_all(older, monkeypatch):
    original = save_module.plan_shard

    def failing(pieces, metadata):
        if metadata["rank"] == "1":
            raise RuntimeError("no such luck")
        return original(pieces, metadata)

    monkeypatch.setattr(save_module, "plan_shard", failing)
    for result in run_threads(2, lambda rank, group: save(older.parent, filled(pieces_of(PAIR, rank)), group)):
        assert "RuntimeError: no such luck" in str(result)
    assert_only(older)
