"""Everything is killed again and again while saves take longer than the save interval; each start goes on from disk."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

import engine.checkpoint.save as save_module
from engine.checkpoint.catalog import is_complete, list_checkpoints, list_directories, newest
from engine.checkpoint.fence import newest_claim
from engine.planning.layout import Layout
from engine.planning.messages import GenerationStart, RestorePoint
from tests.meeting import meeting_store
from tests.training import metrics, tiny_run, train

PAIR = Layout(dp=2)
STEPS_A_KILL = 12
WRITE_S = 0.12


class Watcher(threading.Thread):
    """Lists the directory again and again: once there was a complete checkpoint, there always has to be one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self._directory, self._ended = directory, threading.Event()
        self.looks, self.without = 0, 0
        self._seen = False

    def _any_complete(self) -> bool:
        # Between the listing and the look at what was listed a newer one may take the place of an older one.
        return any(is_complete(entry) for _ in range(3) for entry in list_directories(self._directory))

    def run(self) -> None:
        while not self._ended.wait(0.005):
            found = self._any_complete()
            self.looks += 1
            self.without += self._seen and not found
            self._seen = self._seen or found

    def end(self) -> None:
        self._ended.set()
        self.join()


def _generation(config, generation, restore, history, write_s) -> int:
    """Ranks in a process group of their own, whose writes take ``write_s`` at least; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        original = save_module.write_shard

        def slow(plan, path):
            time.sleep(write_s)
            return original(plan, path)

        save_module.write_shard = slow
        train(config, PAIR, generation=generation, restore=restore, history=history)
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_killed_at_random_moments_every_start_takes_the_newest_and_loses_no_sample(kills, corpus, tmp_path):
    """Keep is 1. The losses, of the surviving history, are those of the run that was left alone, to the bit."""
    steps = STEPS_A_KILL * kills
    twin = tiny_run(corpus, tmp_path / "twin", train_steps=steps, log_samples=False)
    expected = {line["step"]: line["loss"] for line in train(twin, PAIR)}

    config = tiny_run(corpus, tmp_path / "run", train_steps=steps, log_samples=False)
    saving = config.checkpoint.model_copy(update={"save_interval": 2, "keep": 1})
    config = config.model_copy(update={"checkpoint": saving})
    directory = tmp_path / "run" / "checkpoints"
    meeting_store()  # outside the groups that are killed
    moments = random.Random(5)
    watcher = Watcher(directory)
    watcher.start()
    starts: list[GenerationStart] = []
    while True:
        generation = len(starts) + 1
        found = newest(directory, starts)
        restore = None
        if found is not None:
            restore = RestorePoint(step=found.step, generation=found.generation, directory=str(found.directory))
        assert restore is not None or not starts or starts[-1].start_step == 0
        pid = _generation(config, generation, restore, tuple(starts), WRITE_S if generation <= kills else 0.0)
        starts.append(GenerationStart(generation=generation, start_step=restore.step if restore else 0))
        if generation > kills:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            break
        # Every other time from its start on, while it restores, steps and saves; else when it has saved once.
        while newest_claim(directory) < generation:
            time.sleep(0.002)
        while generation % 2 and not any(e.generation == generation for e in list_checkpoints(directory)):
            time.sleep(0.002)
        time.sleep(moments.uniform(0.0, 0.4))
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while True:  # the ranks were its children and are reaped by init
            try:
                os.killpg(pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.002)
    watcher.end()
    assert watcher.looks > kills and watcher.without == 0

    begun = [start.start_step for start in starts]
    assert begun == sorted(begun) and len(set(begun)) > kills // 2
    losses = {}
    for start, until in zip(starts, [*begun[1:], steps], strict=True):
        path = tmp_path / "run" / "metrics" / f"g{start.generation:04d}.jsonl"
        lines = metrics(config, start.generation) if path.exists() else []
        losses |= {line["step"]: line["loss"] for line in lines if line["step"] <= until}
    assert losses == expected
