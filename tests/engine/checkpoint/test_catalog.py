"""Which checkpoints count, and which may be deleted."""

import pytest

from engine.checkpoint.catalog import directory_name, list_checkpoints, newest, prune
from engine.planning.messages import GenerationStart


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"


def make(directory, step, generation, complete=True):
    path = directory / directory_name(step, generation)
    path.mkdir(parents=True)
    (path / "shard-00000.safetensors").write_bytes(b"x")
    if complete:
        (path / "manifest.json").write_text("{}")
    return path


def history(*starts):
    return [GenerationStart(generation=g, start_step=s) for g, s in starts]


def names(entries):
    return [(e.step, e.generation) for e in entries]


def test_only_directories_with_a_manifest_count_newest_first(directory):
    assert list_checkpoints(directory) == [] and newest(directory) is None
    make(directory, 10, 1)
    make(directory, 1_000_000_000, 1)
    make(directory, 20, 2)
    make(directory, 30, 2, complete=False)
    (make(directory, 25, 2, complete=False) / "manifest.json.tmp-77").write_text("{}")
    (directory / "step-000000099.g1").write_text("a file")
    (directory / "step-99.g1").mkdir()
    (directory / "latest").write_text("step-000000030.g2")
    assert names(list_checkpoints(directory)) == [(1_000_000_000, 1), (20, 2), (10, 1)]
    assert directory_name(40, 2) == "step-000000040.g2"


def test_what_an_older_generation_wrote_beyond_the_start_of_a_later_one_is_ignored(directory):
    for step, generation in [(10, 1), (20, 1), (30, 1), (25, 2), (30, 2), (40, 3)]:
        make(directory, step, generation)
    assert newest(directory, history((1, 0), (2, 20))).step == 40
    assert names(list_checkpoints(directory, history((1, 0), (2, 20), (3, 25)))) == [(40, 3), (25, 2), (20, 1), (10, 1)]
    # Going further back cuts more than one generation.
    assert names(list_checkpoints(directory, history((1, 0), (2, 20), (3, 25), (4, 10)))) == [(10, 1)]


def test_retention_keeps_the_newest_that_count_and_what_is_protected(directory):
    for step in (10, 20, 30, 40):
        make(directory, step, 1)
    ghost = make(directory, 60, 1)
    unfinished = make(directory, 50, 2, complete=False)
    failed = make(directory, 35, 1, complete=False)
    starts = history((1, 0), (2, 40))
    removed = prune(directory, 2, starts, protected_steps=[10])
    assert set(removed) == {directory / directory_name(20, 1), ghost, failed}
    assert names(list_checkpoints(directory, starts)) == [(40, 1), (30, 1), (10, 1)]
    assert unfinished.exists(), "the current generation may be writing it"
    assert prune(directory, 1, starts) == [directory / directory_name(30, 1), directory / directory_name(10, 1)]
    assert names(list_checkpoints(directory)) == [(40, 1)]
    assert prune(directory, 1, starts) == []


def test_the_last_complete_checkpoint_survives_newer_incomplete_ones(directory):
    make(directory, 10, 1)
    make(directory, 20, 1, complete=False)
    prune(directory, 1, history((1, 0), (2, 10)))
    assert names(list_checkpoints(directory)) == [(10, 1)]
    assert not (directory / directory_name(20, 1)).exists()
    with pytest.raises(ValueError, match="keep 0"):
        prune(directory, 0)


def test_without_one_that_counts_nothing_complete_is_deleted(directory):
    make(directory, 60, 1)
    assert prune(directory, 1, history((1, 0), (2, 40))) == []
    assert (directory / directory_name(60, 1)).exists()
