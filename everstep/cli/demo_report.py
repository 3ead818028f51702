"""What the demo claims, computed from what the run wrote: pure functions over metrics lines and the plans' history.

``step`` is a number of completed steps, so the first step's line carries 1. A generation whose ``start_step`` is s
began with s steps complete; of the generation before, the lines up to s belong to the surviving history and the lines
beyond it are rolled back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.planning.messages import GenerationStart

SPLIT = ("detect", "decide", "stop", "start", "meet", "build", "restore", "first_step")
"""Phases of a recovery, in order. ``other`` is what none of them accounts for: messages on their way, waiting."""

LOSS_BOUND = 1e-4
"""Largest relative difference between the losses of a disturbed run and its twin: rounding, nothing else."""


@dataclass(frozen=True)
class StepLine:
    """One completed step, as the metrics file of a generation has it. ``at`` is wall-clock seconds."""

    step: int
    loss: float
    at: float
    tokens_per_s: float = 0.0


@dataclass(frozen=True)
class Kill:
    """The fault that the demo causes: when (wall clock), and in which generation."""

    at: float
    generation: int


@dataclass(frozen=True)
class Recovery:
    """One change of generation and its price.

    ``seconds`` runs from the fault (or, for growth, from the last step before) to the first step that the new
    generation completes. ``steps_lost`` counts completed steps that have to be done again.
    """

    kind: str
    seconds: float
    steps_lost: int
    split: Mapping[str, float]
    from_generation: int
    to_generation: int
    from_layout: str
    to_layout: str

    def as_json(self) -> dict[str, Any]:
        """Plain values, seconds rounded to milliseconds."""
        answer = asdict(self)
        answer["seconds"] = round(self.seconds, 3)
        answer["split"] = {name: round(value, 3) for name, value in self.split.items()}
        return answer


def read_metrics(path: Path) -> list[StepLine]:
    """The lines of one generation's metrics file; a half line at the end (a writer in mid write) is left out."""
    lines = []
    for text in path.read_bytes().split(b"\n")[:-1]:
        record = json.loads(text)
        lines.append(
            StepLine(
                step=int(record["step"]),
                loss=float(record["loss"]),
                at=float(record["at"]),
                tokens_per_s=float(record.get("tokens_per_s") or 0.0),
            )
        )
    return lines


def read_run_metrics(run_directory: Path, history: Sequence[GenerationStart]) -> dict[int, list[StepLine]]:
    """Metrics of every generation of a job; a generation that never completed a step has none."""
    paths = {start.generation: metrics_file(run_directory, start.generation) for start in history}
    return {generation: read_metrics(path) if path.exists() else [] for generation, path in paths.items()}


def metrics_file(run_directory: Path, generation: int) -> Path:
    """Where a generation's metrics lines are."""
    return run_directory / "metrics" / f"g{generation:04d}.jsonl"


def surviving_lines(history: Sequence[GenerationStart], lines_of: Mapping[int, Sequence[StepLine]]) -> list[StepLine]:
    """The lines that count, in order of steps: of each generation those that no later one began before.

    Raises ValueError when a step is missing or there twice.
    """
    survivors: list[StepLine] = []
    for number, start in enumerate(history):
        end = min((later.start_step for later in history[number + 1 :]), default=None)
        survivors += [line for line in lines_of.get(start.generation, ()) if end is None or line.step <= end]
    steps = [line.step for line in survivors]
    if steps != list(range(1, len(steps) + 1)):
        odd = next(at for at, step in enumerate(steps, start=1) if at != step)
        raise ValueError(f"surviving history has step {steps[odd - 1]} where step {odd} belongs")
    return survivors


def steps_lost(old_lines: Sequence[StepLine], restore_step: int) -> int:
    """Steps that the old generation had completed beyond the state that the new one starts from."""
    return len({line.step for line in old_lines if line.step > restore_step})


def recoveries_of(
    recovered: Sequence[Mapping[str, Any]], lines_of: Mapping[int, Sequence[StepLine]], kill: Kill
) -> list[Recovery]:
    """Every recovery of a run whose one fault was the kill of a node; ``recovered`` is the data of those events.

    What was caused and seen from outside (the kill, the step lines of the old and the new generation) is taken from
    there; the phases between are the service's own figures, with detection counted from the kill.
    Raises ValueError when a recovery's generation completed no step.
    """
    recoveries: list[Recovery] = []
    for data in recovered:
        kind, old, new = str(data["kind"]), int(data["old_generation"]), int(data["generation"])
        split = {name: float(data["split"].get(name, 0.0)) for name in SPLIT}
        if kind == "grow":
            began_at = lines_of[old][-1].at
        elif not any(recovery.kind == "node_lost" for recovery in recoveries):
            seen_at = float(data["at"]) + split["detect"]
            kind, old, began_at = "node_lost", kill.generation, kill.at
            split["detect"] = max(0.0, seen_at - kill.at)
        else:  # a fault that nobody caused
            began_at = float(data["down_since"])
        if not lines_of.get(new):
            raise ValueError(f"generation {new} completed no step")
        seconds = lines_of[new][0].at - began_at
        split["other"] = max(0.0, seconds - sum(split.values()))
        recoveries.append(
            Recovery(
                kind=kind,
                seconds=seconds,
                steps_lost=steps_lost(lines_of.get(old, ()), int(data["restored_step"])),
                split=split,
                from_generation=old,
                to_generation=new,
                from_layout=str(data["old_layout"]),
                to_layout=str(data["new_layout"]),
            )
        )
    return recoveries


def max_relative_loss_difference(trail: Sequence[StepLine], twin: Sequence[StepLine]) -> float:
    """Largest ``|loss - twin| / |twin|`` over all steps.

    Raises ValueError unless both trails have the same steps.
    """
    if [line.step for line in trail] != [line.step for line in twin]:
        raise ValueError(f"the run has {len(trail)} steps, its twin {len(twin)}")
    return max((abs(a.loss - b.loss) / abs(b.loss) for a, b in zip(trail, twin, strict=True)), default=0.0)
