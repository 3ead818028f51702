"""What is set aside is not restored from, not deleted, can be taken back; ranks set nothing aside but real damage."""

from __future__ import annotations

import errno
import json

import pytest
import torch

from engine.agent_link import AgentLink
from engine.checkpoint.catalog import directory_name, list_checkpoints, newest, prune
from engine.checkpoint.errors import CheckpointDamaged
from engine.checkpoint.fence import claim, newest_claim
from engine.checkpoint.load import load_checkpoint
from engine.checkpoint.quarantine import (
    is_set_aside,
    list_set_aside,
    really_damaged,
    release,
    set_aside,
    set_aside_after_load,
)
from engine.checkpoint.sources import DiskSource
from engine.checkpoint.verify import verify
from engine.planning.layout import Layout
from engine.planning.messages import GenerationStart
from engine.telemetry import Telemetry
from engine.train import Trainer
from tests.engine.checkpoint.synthetic import filled, good, load_all, pieces_of, run_threads, save_all
from tests.harness import groups_of, run_ranks
from tests.training import launch_of, newest_checkpoint, tiny_run, train

LAYOUT = Layout(tp=2, dp=2)
CPU = torch.device("cpu")


def save(directory, step):
    return save_all(directory, LAYOUT, [filled(pieces_of(LAYOUT, rank)) for rank in range(4)], step=step)


@pytest.fixture
def checkpoints(tmp_path):
    directory = tmp_path / "checkpoints"
    for step in (5, 10, 15):
        save(directory, step)
    return directory


def steps(directory):
    return [entry.step for entry in list_checkpoints(directory)]


def test_what_is_set_aside_is_seen_by_no_reader_and_stays(checkpoints):
    place = set_aside(checkpoints / directory_name(15, 1), "gives NaN", file="shard-00001.safetensors")
    assert place == checkpoints / "bad-step-000000015.g1" and is_set_aside(place)
    assert steps(checkpoints) == [10, 5]
    (aside,) = list_set_aside(checkpoints)
    assert (aside.step, aside.generation, aside.directory, aside.reason) == (15, 1, place, "gives NaN")
    assert json.loads((place / "quarantine.json").read_text())["file"] == "shard-00001.safetensors"
    prune(checkpoints, 1, [GenerationStart(generation=1, start_step=0), GenerationStart(generation=9, start_step=15)])
    assert steps(checkpoints) == [10] and verify(place) == []


def test_it_can_be_taken_back_unless_its_name_is_taken(checkpoints):
    place = set_aside(checkpoints / directory_name(15, 1), "a mistake")
    save(checkpoints, 15)
    with pytest.raises(ValueError, match="there already"):
        release(place)
    second = set_aside(checkpoints / directory_name(15, 1), "bad again")
    assert second.name == "bad-step-000000015.g1-2"
    assert [aside.directory for aside in list_set_aside(checkpoints)] == [second, place]
    assert release(second) == checkpoints / directory_name(15, 1)
    assert steps(checkpoints) == [15, 10, 5]
    assert not (checkpoints / directory_name(15, 1) / "quarantine.json").exists()


def test_only_complete_checkpoints_are_set_aside_and_only_those_taken_back(checkpoints):
    (checkpoints / "latest").mkdir()
    with pytest.raises(ValueError, match="is no checkpoint"):
        set_aside(checkpoints / "latest", "x")
    with pytest.raises(ValueError, match="not there or not complete"):
        set_aside(checkpoints / directory_name(20, 1), "x")
    with pytest.raises(ValueError, match="is not set aside"):
        release(checkpoints / directory_name(10, 1))
    with pytest.raises(FileNotFoundError):
        release(checkpoints / "bad-step-000000077.g1")
    assert steps(checkpoints) == [15, 10, 5] and list_set_aside(checkpoints / "nowhere") == []


def test_a_lost_note_loses_the_reason_only(checkpoints):
    place = set_aside(checkpoints / directory_name(15, 1), "x")
    for text in ("", "[]", '{"reason": "x"}'):
        (place / "quarantine.json").write_text(text)
        assert [(aside.step, aside.reason) for aside in list_set_aside(checkpoints)] == [(15, "")]


def truncate(checkpoint):
    (checkpoint / "shard-00001.safetensors").write_bytes(b"")


def cut(checkpoint):
    shard = checkpoint / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])


def flip(checkpoint):
    shard = checkpoint / "shard-00001.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)


def delete(checkpoint):
    (checkpoint / "shard-00001.safetensors").unlink()


def swap(checkpoint):
    one, two = (checkpoint / f"shard-0000{rank}.safetensors" for rank in (1, 3))
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)


def write_text_over_the_manifest(checkpoint):
    (checkpoint / "manifest.json").write_text("step 15 was here\n")


DAMAGES = [truncate, cut, flip, delete, swap, write_text_over_the_manifest]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_each_damage_is_found_at_the_load_and_the_older_one_is_newest_then(checkpoints, damage):
    """P32 (a) to (f): found before the first step, named, set aside, and the next start takes the older one."""
    bad = checkpoints / directory_name(15, 1)
    damage(bad)
    assert verify(bad)

    def start(rank, group):
        with pytest.raises(CheckpointDamaged) as caught:
            load_checkpoint(pieces_of(LAYOUT, rank), bad, group)
        return set_aside_after_load(caught.value, bad, group, CPU)

    told = good_values(run_threads(4, start))
    assert len({str(one) for one in told}) == 1
    assert told[0].file.startswith(str(bad)) and told[0].reason.endswith("set aside as bad-step-000000015.g1")
    assert newest(checkpoints).step == 10 and [aside.step for aside in list_set_aside(checkpoints)] == [15]
    good(load_all(newest(checkpoints).directory, [pieces_of(LAYOUT, rank) for rank in range(4)]))


def good_values(results):
    """The results of threads that returned exceptions as values."""
    assert all(type(one) is CheckpointDamaged for one in results), results
    return results


def told_of(checkpoint, file, still_current=lambda: True):
    """What all ranks hear when a load has named ``file``."""
    damage = CheckpointDamaged(str(checkpoint / file), "does not fit its checksums")
    told = run_threads(2, lambda rank, group: set_aside_after_load(damage, checkpoint, group, CPU, still_current))
    assert len({str(one) for one in good_values(told)}) == 1
    return told[0]


def test_a_fault_of_one_reader_takes_no_good_checkpoint_away(checkpoints):
    for file in ("shard-00001.safetensors", "manifest.json", "shard-00099.safetensors", "../other"):
        told = told_of(checkpoints / directory_name(15, 1), file)
        assert told.reason == "does not fit its checksums"
    assert steps(checkpoints) == [15, 10, 5]


def test_a_ghost_sets_nothing_aside(checkpoints):
    bad = checkpoints / directory_name(15, 1)
    flip(bad)
    assert "set aside" not in told_of(bad, "shard-00001.safetensors", still_current=lambda: False).reason
    assert steps(checkpoints) == [15, 10, 5]


def test_a_disk_that_does_not_answer_is_no_damage(checkpoints, monkeypatch):
    """An input/output error may pass; the data may be all right."""
    bad = checkpoints / directory_name(15, 1)
    flip(bad)
    real = DiskSource._open

    def broken(self, file):
        if file == "shard-00001.safetensors":
            raise OSError(errno.EIO, "Input/output error")
        return real(self, file)

    monkeypatch.setattr(DiskSource, "_open", broken)
    assert not really_damaged(bad, str(bad / "shard-00001.safetensors"))
    monkeypatch.undo()
    assert really_damaged(bad, str(bad / "shard-00001.safetensors"))


def test_a_checkpoint_of_another_version_and_an_incomplete_one_are_no_damage(checkpoints):
    later, gone = checkpoints / directory_name(15, 1), checkpoints / directory_name(10, 1)
    (later / "manifest.json").write_text('{"format": "everstep-checkpoint", "format_version": 2}')
    (gone / "manifest.json").unlink()
    for checkpoint in (later, gone):
        assert not really_damaged(checkpoint, str(checkpoint / "manifest.json"))


def test_when_it_cannot_be_renamed_the_damage_says_so(checkpoints, monkeypatch):
    bad = checkpoints / directory_name(15, 1)
    flip(bad)

    def read_only(checkpoint, reason, file=None):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("engine.checkpoint.quarantine.set_aside", read_only)
    assert told_of(bad, "shard-00001.safetensors").reason.endswith("could not be set aside: Read-only file system")


def _start(rank, store, config, layout, point, generation):
    launch = launch_of(config, layout, rank, generation=generation, restore=point)
    link = AgentLink.connect(launch)
    try:
        Trainer(launch, groups_of(layout, rank, store), link, Telemetry(launch, link, CPU), CPU)
    except CheckpointDamaged as damage:
        return [damage.file, damage.reason]
    return None


def test_the_ranks_of_a_run_set_a_damaged_checkpoint_aside_and_the_next_generation_goes_further_back(corpus, tmp_path):
    config = tiny_run(corpus, tmp_path, train_steps=4)
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"save_interval": 2})})
    layout = Layout(tp=2)
    train(config, layout)
    point = newest_checkpoint(config, 4)
    directory = tmp_path / "checkpoints"
    bad = directory / directory_name(4, 1)
    flip(bad)
    # A ghost of the generation before leaves it where it is.
    claim(directory, 3)
    assert run_ranks(2, _set_aside_as_ghost, layout, bad, directory) == [False, False]
    assert newest(directory).step == 4

    told = run_ranks(2, _start, config, layout, point, 4)
    assert told[0] == told[1] and told[0][0] == str(bad / "shard-00001.safetensors")
    assert told[0][1].endswith("the checkpoint was set aside as bad-step-000000004.g1")
    assert newest(directory).step == 2
    assert run_ranks(2, _start, config, layout, newest_checkpoint(config, 2), 5) == [None, None]


def _set_aside_as_ghost(rank, store, layout, bad, directory):
    damage = CheckpointDamaged(str(bad / "shard-00001.safetensors"), "x")
    world = groups_of(layout, rank, store).world
    told = set_aside_after_load(damage, bad, world, CPU, lambda: newest_claim(directory) <= 2)
    return "set aside" in told.reason
