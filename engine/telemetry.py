"""What a run says about itself: a metrics line for every step, and the phase and figures for the agent.

``metrics/g<generation>.jsonl`` below the run directory has one JSON line a completed step, written by rank 0. A step
counts as completed when its line is out. Lines that a later generation repeats are not removed: of generation g only
the lines up to the step at which generation g+1 began belong to the surviving history.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import torch

from engine.agent_link import AgentLink
from engine.planning.config import RunConfig
from engine.planning.flops import mfu
from engine.planning.messages import Phase, Progress, RankLaunch


class LineLog:
    """A file of JSON lines; each line is handed to the kernel whole, so a killed process leaves no half line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, record: dict[str, object]) -> None:
        """Append one line."""
        self._file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def memory_in_use(device: torch.device) -> int:
    """Bytes: the peak of the CUDA allocator, or the peak resident size of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Telemetry:
    """Phase, timings and figures of one rank.

    ``phase`` is called by the main loop alone; the seconds of each start-up phase end up in ``timings``.
    """

    def __init__(self, launch: RankLaunch, link: AgentLink, device: torch.device) -> None:
        self._launch = launch
        self._link = link
        self._device = device
        self._since = time.monotonic()
        self.timings: dict[str, float] = {}
        self.step = launch.start_step
        self._metrics: LineLog | None = None

    def open(self) -> None:
        """Open the metrics file (rank 0 has one). Raises OSError when the run directory cannot be written."""
        launch = self._launch
        if launch.rank == 0:
            self._metrics = LineLog(Path(launch.run_directory) / "metrics" / f"g{launch.generation:04d}.jsonl")

    def lap(self, name: str) -> None:
        """Book the seconds since the last lap under ``name``."""
        now = time.monotonic()
        self.timings[name] = self.timings.get(name, 0.0) + now - self._since
        self._since = now

    def phase(self, phase: Phase) -> None:
        """Tell the agent what the main loop does now."""
        self._link.send(
            Progress(rank=self._launch.rank, phase=phase, step=self.step, at=time.time(), timings=dict(self.timings))
        )

    def completed(
        self,
        step: int,
        *,
        loss: float | None,
        grad_norm: float | None,
        lr: float,
        step_s: float,
        loss_scale: float | None = None,
    ) -> None:
        """A step is complete: write its line, tell the agent. ``step`` is the number of completed steps.

        ``grad_norm`` is None when fp16 overflowed and the update was skipped, ``loss`` when that too is not finite.
        ``loss_scale`` is what the step's loss was multiplied by, None unless the run is fp16.
        """
        launch, run = self._launch, self._launch.run
        self.step = step
        if "first_step" not in self.timings:
            self.lap("first_step")
        tokens_per_s = run.train.global_batch_size * run.train.sequence_length / step_s
        figures = self._utilisation(run, tokens_per_s)
        now = time.time()
        if self._metrics is not None:
            self._metrics.write(
                {
                    "step": step,
                    "loss": loss,
                    "grad_norm": grad_norm,
                    **({} if loss_scale is None else {"loss_scale": loss_scale}),
                    "lr": lr,
                    "step_s": step_s,
                    "tokens_per_s": tokens_per_s,
                    **{f"mfu_{convention}": value for convention, value in figures.items()},
                    "consumed_samples": step * run.train.global_batch_size,
                    "generation": launch.generation,
                    "layout": str(launch.layout),
                    "at": now,
                }
            )
        self._link.send(
            Progress(
                rank=launch.rank,
                phase="stepping",
                step=step,
                at=now,
                loss=loss,
                grad_norm=grad_norm,
                lr=lr,
                step_s=step_s,
                tokens_per_s=tokens_per_s,
                mfu=figures.get("full"),
                memory_bytes=memory_in_use(self._device),
                timings=dict(self.timings),
            )
        )

    def _utilisation(self, run: RunConfig, tokens_per_s: float) -> dict[str, float]:
        if not self._launch.peak_flops:
            return {}
        return {
            name: mfu(
                run.model,
                run.train.sequence_length,
                tokens_per_s=tokens_per_s,
                num_devices=self._launch.layout.world_size,
                peak_flops=self._launch.peak_flops,
                causal=name == "causal",
            )
            for name in ("full", "causal")
        }

    def close(self) -> None:
        """Close the metrics file."""
        if self._metrics is not None:
            self._metrics.close()
