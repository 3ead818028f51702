"""Saves beside training: what they hold, how long training waits for them, and what happens when they fail."""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import engine.checkpoint.save as save_module
import engine.saving as saving_module
from engine.agent_link import AgentLink
from engine.checkpoint.catalog import directory_name, list_checkpoints
from engine.checkpoint.errors import CheckpointSaveError
from engine.checkpoint.verify import verify
from engine.failure import categorise
from engine.planning.layout import Layout
from engine.planning.messages import CheckpointCommitted, SaveFailed, StopRequest
from engine.precision import configure_device
from engine.telemetry import Telemetry
from engine.train import Trainer
from tests.harness import groups_of, run_ranks
from tests.training import launch_of, tiny_run

PAIR = Layout(dp=2)


def saving(config, **settings):
    """``config`` with other settings of its checkpoints."""
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=settings)})


class Link(AgentLink):
    """Keeps what the rank says, with the time of each message."""

    def __init__(self, launch):
        super().__init__(None, launch.agent_silence_limit_s)
        self.sent = []

    def send(self, message):
        self.sent.append((time.monotonic(), message))

    def of(self, kind):
        return [(at, message) for at, message in self.sent if isinstance(message, kind)]


class Steps(Telemetry):
    """Calls ``then`` with the number of completed steps."""

    then = staticmethod(lambda step: None)

    def completed(self, step, **figures):
        super().completed(step, **figures)
        self.then(step)


def rank_of(rank, store, config, layout, then=None, device="cpu"):
    """A trainer and its link, inside ``run_ranks``."""
    launch = launch_of(config, layout, rank, device=device)
    own = torch.device(launch.device)
    configure_device(own, launch.num_threads)
    link = Link(launch)
    telemetry = Steps(launch, link, own)
    if then is not None:
        telemetry.then = then
    return Trainer(launch, groups_of(layout, rank, store, device=own), link, telemetry, own), link


def slow_writes(seconds):
    """Every rank of this process takes this long to write its shard; returns the times of the writes, to be filled."""
    original, spans = save_module.write_shard, []

    def slow(plan, path):
        began = time.monotonic()
        time.sleep(seconds)
        entry = original(plan, path)
        spans.append((began, time.monotonic()))
        return entry

    save_module.write_shard = slow
    return spans


def _train(rank, store, config, layout, write_s):
    spans = slow_writes(write_s)
    completed = {}
    trainer, link = rank_of(rank, store, config, layout, lambda step: completed.setdefault(step, time.monotonic()))
    assert trainer.run().complete
    committed = [(at, m.step, m.stall_s, m.seconds) for at, m in link.of(CheckpointCommitted)]
    return {"completed": completed, "committed": committed, "spans": spans}


def files_of(directory: Path):
    """Everything that checkpoints hold but the time at which they were written."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            if path.name == "manifest.json":
                manifest = json.loads(content)
                content = {k: v for k, v in manifest.items() if k not in ("saved_at", "run", "manifest_crc32")}
            found[str(path.relative_to(directory))] = content
    return found


def train_ahead(rank, store, config, layout, device="cpu"):
    """Every write but the last waits until the step after its own is complete."""
    original = save_module.write_shard
    completed = threading.Condition()

    def then(step):
        with completed:
            completed.notify_all()

    def write(plan, path):
        step = int(path.parent.name[5:14])
        with completed:
            ahead = completed.wait_for(lambda: trainer.telemetry.step > step, timeout=60)
        assert ahead
        return original(plan, path)

    trainer, link = rank_of(rank, store, config, layout, then, device)
    save_module.write_shard = lambda plan, path: (original if "000007" in path.parent.name else write)(plan, path)
    trainer.run()
    assert [m.step for _, m in link.of(CheckpointCommitted)] == ([3, 6, 7] if rank == 0 else [])
    assert "checkpoint-writer" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("layout", [PAIR, Layout(tp=2)], ids=str)
def test_a_background_save_holds_the_state_of_its_step_though_training_goes_on(layout, corpus, tmp_path):
    """The same bytes as a synchronous save, though the next step ends before a byte is written."""
    apart = saving(tiny_run(corpus, tmp_path / "apart", train_steps=7), save_interval=3)
    run_ranks(2, train_ahead, apart, layout)
    along = saving(tiny_run(corpus, tmp_path / "along", train_steps=7), save_interval=3, asynchronous=False)
    results = run_ranks(2, _train, along, layout, 0.0)
    for result in results:
        ends = [end for _, end in result["spans"]]
        assert ends[0] < result["completed"][4] and ends[1] < result["completed"][7]
    found = [files_of(tmp_path / name / "checkpoints") for name in ("apart", "along")]
    assert len(found[0]) == 3 * 3 + 1
    assert found[0] == found[1]


def test_a_save_that_comes_too_early_waits_and_the_waiting_counts_as_stall(corpus, tmp_path):
    config = saving(tiny_run(corpus, tmp_path, train_steps=4), save_interval=1, keep=1)
    results = run_ranks(2, _train, config, PAIR, 0.3)
    for result in results:
        spans = result["spans"]
        assert len(spans) == 4
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    ends = [end for _, end in results[0]["spans"]]
    for (_, step, stall_s, _), end in zip(results[0]["committed"][1:], ends[:3], strict=True):
        assert stall_s > end - results[0]["completed"][step]
    assert [entry.step for entry in list_checkpoints(tmp_path / "checkpoints")] == [4]


def _no_room(rank, store, config, victim):
    if rank == victim:

        def full(pieces):
            raise MemoryError("no room")

        saving_module.HostCopy = full
    return _train(rank, store, config, PAIR, 0.2)


def test_a_rank_without_room_for_a_copy_saves_while_it_waits(corpus, tmp_path, capfd):
    config = saving(tiny_run(corpus, tmp_path, train_steps=5), save_interval=2)
    results = run_ranks(2, _no_room, config, 1)
    assert [step for _, step, _, _ in results[0]["committed"]] == [2, 4, 5]
    assert results[1]["completed"][3] > results[1]["spans"][0][1]
    assert capfd.readouterr().err.count("checkpoint.asynchronous: no room; training waits while state is saved") == 1
    for entry in list_checkpoints(tmp_path / "checkpoints"):
        assert verify(entry.directory) == []


def _stop(rank, store, config, request):
    slow_writes(0.2)

    def then(step):
        if step == 3 and rank == 1:
            link._stop = request

    trainer, link = rank_of(rank, store, config, PAIR, then)
    outcome = trainer.run()
    return outcome.step, outcome.complete, [m.step for _, m in link.of(CheckpointCommitted)]


@pytest.mark.parametrize(("save", "saved"), [(True, [3, 4]), (False, [3])], ids=["save", "as it is"])
def test_a_generation_that_is_asked_to_stop_ends_after_its_saves(save, saved, corpus, tmp_path):
    config = saving(tiny_run(corpus, tmp_path), save_interval=3)
    results = run_ranks(2, _stop, config, StopRequest(save=save))
    assert [result[:2] for result in results] == [(4, False)] * 2
    assert results[0][2] == saved
    assert sorted(entry.step for entry in list_checkpoints(tmp_path / "checkpoints")) == saved


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _memory(rank, store, config):
    resident, threads = {}, {}

    def then(step):
        resident[step], threads[step] = _resident_bytes(), threading.active_count()

    trainer, _ = rank_of(rank, store, config, PAIR, then)
    trainer.run()
    state = sum(p.data.numel() * p.dtype.itemsize for p in trainer.optimizer.pieces() if p.owned)
    return resident, threads, state


def test_memory_and_threads_do_not_grow_over_forty_saves(corpus, tmp_path):
    model = {"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": 2}
    config = tiny_run(corpus, tmp_path, model=model, train_steps=41, global_batch_size=2, sequence_length=16)
    config = saving(config, save_interval=1, keep=1)
    for resident, threads, state in run_ranks(2, _memory, config):
        # A copy that stays at each save would be 35 of them; the steps alone add about one.
        growth = resident[41] - resident[6]
        assert growth < 4 * state and growth < 0.2 * resident[6]
        assert len({threads[step] for step in range(6, 42)}) == 1


def _failing(rank, store, config, fault):
    """Train with ``fault(rank, step)`` called before this rank writes its shard of ``step``; returns how it went."""
    original = save_module.write_shard

    def write(plan, path):
        fault(rank, int(path.parent.name[5:14]))
        return original(plan, path)

    save_module.write_shard = write
    trainer, link = rank_of(rank, store, config, PAIR)
    told, category = "", ""
    try:
        trainer.run()
    except CheckpointSaveError as error:
        told, category = str(error), categorise(error, stepped=True)
    failed = [m.model_dump() for _, m in link.of(SaveFailed)]
    return {
        "step": trainer.telemetry.step,
        "told": told,
        "category": category,
        "failed": failed,
        "committed": [m.step for _, m in link.of(CheckpointCommitted)],
    }


def _input_output_error(steps, failing_rank=1):
    def fault(rank, step):
        if rank == failing_rank and step in steps:
            raise CheckpointSaveError("shard", os.strerror(errno.EIO), errno.EIO)

    return fault


def _left(tmp_path):
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def test_a_failed_save_is_told_cleared_away_and_survived(corpus, tmp_path):
    """An input/output error on one rank: the save counts as failed on all, the next one is as good as ever."""
    config = saving(tiny_run(corpus, tmp_path, train_steps=8), save_interval=2, max_failures=2)
    results = run_ranks(2, _failing, config, _input_output_error({4}))
    assert [result["step"] for result in results] == [8, 8] and not any(result["told"] for result in results)
    assert results[0]["committed"] == [2, 6, 8]
    assert results[0]["failed"] == [
        {
            "kind": "save_failed",
            "step": 4,
            "generation": 1,
            "errno": errno.EIO,
            "file": "shard",
            "reason": "Input/output error",
            "failures_in_a_row": 1,
        }
    ]
    assert _left(tmp_path) == ["generation-1", *(directory_name(step, 1) for step in (2, 6, 8))]


def test_failures_that_are_not_in_a_row_do_not_end_the_run(corpus, tmp_path):
    config = saving(tiny_run(corpus, tmp_path, train_steps=8), save_interval=1, max_failures=2)
    results = run_ranks(2, _failing, config, _input_output_error({1, 3, 5, 7}, failing_rank=0))
    assert results[0]["committed"] == [2, 4, 6, 8] and len(results[0]["failed"]) == 4


def test_a_full_disk_ends_the_run_after_so_many_failures_on_all_ranks_at_the_same_step(corpus, tmp_path):
    def full(rank, step):
        if rank == 1 and step > 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, resource.RLIM_INFINITY))

    config = saving(tiny_run(corpus, tmp_path, train_steps=40), save_interval=2, max_failures=3)
    results = run_ranks(2, _failing, config, full)
    assert results[0]["committed"] == [2]
    assert [(f["step"], f["errno"], f["failures_in_a_row"]) for f in results[0]["failed"]] == [
        (4, errno.EFBIG, 1),
        (6, errno.EFBIG, 2),
        (8, errno.EFBIG, 3),
    ]
    assert results[0]["step"] == results[1]["step"] and 8 <= results[0]["step"] <= 10
    assert all("File too large" in result["told"] for result in results)
    # The rank whose disk is full is at fault, the other one only heard of it.
    assert [result["category"] for result in results] == ["collective", "internal"]
    assert _left(tmp_path) == ["generation-1", directory_name(2, 1)]
    assert verify(tmp_path / "checkpoints" / directory_name(2, 1)) == []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_whose_last_save_fails_is_not_complete(asynchronous, corpus, tmp_path):
    config = saving(tiny_run(corpus, tmp_path, train_steps=5), save_interval=3, asynchronous=asynchronous)
    results = run_ranks(2, _failing, config, _input_output_error({5}))
    assert all("Input/output error" in result["told"] for result in results)
    assert results[0]["committed"] == [3] and [f["step"] for f in results[0]["failed"]] == [5]
    assert _left(tmp_path) == ["generation-1", directory_name(3, 1)]
