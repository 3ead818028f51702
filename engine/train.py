"""The training loop of one rank in one generation.

The global batch and the order of samples are functions of the step alone, never of the layout, so a run that is
stopped and goes on elsewhere in another layout takes exactly the samples that the undisturbed run takes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.agent_link import AgentLink
from engine.checkpoint.errors import CheckpointDamaged
from engine.checkpoint.fence import claim
from engine.checkpoint.load import load_checkpoint
from engine.checkpoint.quarantine import set_aside_after_load
from engine.data.loader import BatchLoader, CorpusSamples, MicroBatch, SampleLog
from engine.data_parallel.buckets import ParameterBuckets
from engine.data_parallel.distributed_optimizer import DistributedOptimizer
from engine.groups import Groups
from engine.models.dropout import MaskKey
from engine.models.frozen import freeze, frozen_names
from engine.models.transformer import Stage, initial_values
from engine.pipeline.executor import run_step
from engine.pipeline.schedules import one_forward_one_backward
from engine.planning.messages import RankLaunch, RestorePoint
from engine.planning.schedule import learning_rate
from engine.precision import model_dtype
from engine.saving import CheckpointSaver
from engine.telemetry import Telemetry


@dataclass(frozen=True)
class Agreement:
    """What all ranks agreed on at a step border: whether to stop, and whether to save first.

    ``saves_failed``: saves went wrong, so that this generation has to end.
    """

    now: bool
    save: bool
    saves_failed: bool


@dataclass(frozen=True)
class Outcome:
    """How a generation ended for this rank: ``complete`` when the last step of the run is done and saved."""

    step: int
    complete: bool


class Trainer:
    """Model, optimizer, data and checkpoints of one rank.

    Building it restores the state that ``launch`` names (or initialises from the seed); ``run`` trains.
    """

    def __init__(
        self, launch: RankLaunch, groups: Groups, link: AgentLink, telemetry: Telemetry, device: torch.device
    ) -> None:
        self.launch, self.groups, self.link, self.telemetry, self.device = launch, groups, link, telemetry, device
        run, train = launch.run, launch.run.train
        self.checkpoints = Path(launch.run_directory) / "checkpoints"
        self.telemetry.phase("building")
        self.telemetry.open()
        if launch.rank == 0:
            claim(self.checkpoints, launch.generation)
        self.stage = Stage(run.model, groups, dtype=model_dtype(train.precision), device=device)
        freeze(self.stage, frozen_names(run.model, train.frozen))
        self.buckets = ParameterBuckets(list(self.stage.parameters()), groups, bucket_size_mb=train.bucket_size_mb)
        self.optimizer = DistributedOptimizer(self.buckets, groups, train)
        self.saver = CheckpointSaver(launch, self.checkpoints, groups.checkpoint, link, self.optimizer.pieces())
        mine = launch.layout.microbatches_of_replica(groups.at.dp, train.num_microbatches)
        self.first_microbatch = mine.start
        self.schedule = one_forward_one_backward(groups.at.pp, launch.layout.pp, len(mine))
        self.loader: BatchLoader | None = None
        self.sample_log: SampleLog | None = None
        if groups.is_first_stage or groups.is_last_stage:
            samples = CorpusSamples(run.data.path, train.sequence_length, vocab_size=run.model.vocab_size)
            self.loader = BatchLoader(samples, train, launch.layout, groups.at.dp)
            if train.log_samples and groups.is_first_stage and groups.at.tp == 0:
                directory = Path(launch.run_directory) / "samples"
                directory.mkdir(parents=True, exist_ok=True)
                self.sample_log = SampleLog(directory / f"g{launch.generation:04d}-dp{groups.at.dp:03d}.jsonl")
        self.telemetry.lap("build")
        if launch.restore is not None:
            self.telemetry.phase("restoring")
            self._restore(launch.restore)
        else:
            self.optimizer.initialise(initial_values(run.model, train.seed))
        self.telemetry.lap("restore")

    def _restore(self, point: RestorePoint) -> None:
        """Take over the state of ``point``. Raises ValueError when this run would go on with other samples.

        A checkpoint that turns out to be damaged is set aside, so that no later start takes it.
        """
        directory, world = Path(point.directory), self.groups.world
        try:
            loaded = load_checkpoint(self.optimizer.pieces(), directory, world, device=self.device).manifest
        except CheckpointDamaged as damage:
            told = set_aside_after_load(damage, directory, world, self.device, self.saver.is_current)
            raise told from damage.__cause__
        batch = self.launch.run.train.global_batch_size
        if loaded.consumed_samples != point.step * batch:
            raise ValueError(
                f"train.global_batch_size {batch}: {point.directory} has consumed {loaded.consumed_samples} samples in "
                f"{point.step} steps, so its run had another batch"
            )
        self.optimizer.after_load(point.step, loaded.extra)

    def run(self) -> Outcome:
        """Train until the run is complete or all ranks agreed to stop; the newest save is published then.

        Raises CheckpointError when the last save failed, or too many in a row.
        """
        train, interval = self.launch.run.train, self.launch.run.checkpoint.save_interval
        step = self.launch.start_step
        self.telemetry.phase("stepping")
        try:
            while step < train.train_steps:
                stop = self._step(step)
                step += 1
                last = step == train.train_steps
                if stop.saves_failed:
                    self.saver.raise_failure()
                if last or step % interval == 0 or stop.save:
                    self._save(step, wait=last or stop.save)
                if stop.now and not last:
                    self.telemetry.phase("stopping")
                    break
            self.saver.close()
            return Outcome(step=step, complete=step == train.train_steps)
        finally:
            self._close()

    def _step(self, step: int) -> Agreement:
        """Run step number ``step`` (counted from 0) and report it; returns what the ranks agreed on about stopping."""
        began = time.monotonic()
        train = self.launch.run.train
        read = self.loader.step(step) if self.loader is not None else []
        batch = [MicroBatch(tokens.to(self.device), targets.to(self.device)) for tokens, targets in read]
        lr = learning_rate(step, train)
        tokens = train.global_batch_size * train.sequence_length
        loss_scale = self.optimizer.loss_scale

        def stage(inputs: Tensor, targets: Tensor | None, microbatch: int) -> Tensor:
            key = MaskKey(train.seed, step, self.first_microbatch + microbatch)
            output: Tensor = self.stage(inputs, targets, key)
            return output

        result = run_step(
            stage,
            self.schedule,
            self.groups,
            batch.__getitem__ if batch else _no_batch,
            activation_shape=(train.sequence_length, train.micro_batch_size, self.launch.run.model.hidden_size),
            dtype=model_dtype(train.precision),
            device=self.device,
            loss_scale=loss_scale / tokens,
            before_last_backward=self.buckets.arm,
        )
        self.buckets.finish()
        # One collective carries the gradient norm, the loss and reasons to stop: every rank then knows the same.
        asked = self.link.stop_requested
        extras = torch.zeros(4, dtype=torch.float64, device=self.device)
        if self.groups.is_last_stage and self.groups.at.tp == 0:
            extras[0] = result.loss_sum.double()
        extras[1] = float(asked is not None)
        extras[2] = float(asked is not None and asked.save)
        extras[3] = float(self.saver.failed)
        grad_norm, summed = self.optimizer.step(lr, extras)
        loss_sum, stop_now, stop_save, saves_failed = summed.tolist()
        if self.sample_log is not None:
            assert self.loader is not None
            self.sample_log.write(step + 1, self.groups.at.dp, self.loader.sample_ids(step))
        self.telemetry.completed(
            step + 1,
            loss=_finite(loss_sum / tokens),
            grad_norm=_finite(grad_norm),
            lr=lr,
            step_s=time.monotonic() - began,
            loss_scale=loss_scale if train.scaling is not None else None,
        )
        return Agreement(now=stop_now > 0, save=stop_save > 0, saves_failed=saves_failed > 0)

    def _save(self, step: int, *, wait: bool) -> None:
        """Save the state after ``step`` completed steps, and ``wait`` for its publication."""
        self.telemetry.phase("saving")
        if wait:
            self.saver.save_and_wait(step, self.optimizer.state())
        else:
            self.saver.save(step, self.optimizer.state())
        self.telemetry.phase("stepping")

    def _close(self) -> None:
        if self.loader is not None:
            self.loader.close()
        if self.sample_log is not None:
            self.sample_log.close()


def _finite(value: float) -> float | None:
    """``value`` as JSON can say it."""
    return value if math.isfinite(value) else None


def _no_batch(microbatch: int) -> tuple[None, None]:
    """What a stage in the middle of the pipeline gets: it needs neither tokens nor targets."""
    return None, None
