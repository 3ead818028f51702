"""Proof that a run consumed each sample exactly once: its sample logs against the order, computed anew.

``python -m engine.data.audit --run-directory DIR --history JSON --run JSON``

Steps in the logs are numbers of completed steps, so the first is 1. ``--history`` lists the generations,
``[{"generation": 1, "start_step": 0}, ...]``; of each the steps beyond the start of a later one were rolled back and do
not count. ``--run`` is the run's configuration (``RunConfig``). Prints one JSON
object. Exit code 0 when every step consumed exactly its samples, 1 when not, 2 when the question cannot be answered.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from engine.data.order import samples_of_step
from engine.planning.config import RunConfig
from engine.planning.corpus import check_corpus
from engine.planning.messages import GenerationStart

_LISTED_PROBLEMS = 10
_histories: TypeAdapter[list[GenerationStart]] = TypeAdapter(list[GenerationStart])


@dataclass(frozen=True)
class Consumed:
    """The samples that one replica took in one step (counted from 1)."""

    step: int
    dp: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Audit:
    """What was found. ``rolled_back`` counts (step, replica) lines that a later generation did again."""

    samples_each_once: bool
    steps: int
    samples: int
    rolled_back: int
    problems: tuple[str, ...]


def read_sample_log(path: Path) -> list[Consumed]:
    """The lines of one replica's log. A last line without its end (a writer in mid write) is left out."""
    lines = []
    for text in path.read_bytes().split(b"\n")[:-1]:
        record = json.loads(text)
        lines.append(Consumed(step=record["step"], dp=record["dp"], samples=tuple(record["samples"])))
    return lines


def read_generation(run_directory: Path, generation: int) -> list[Consumed]:
    """The lines of all replicas of one generation."""
    paths = sorted((run_directory / "samples").glob(f"g{generation:04d}-dp*.jsonl"))
    return [line for path in paths for line in read_sample_log(path)]


def surviving(
    history: Sequence[GenerationStart], generations: Iterable[Sequence[Consumed]]
) -> tuple[list[Consumed], int]:
    """The lines that count, and the number of those that were rolled back. ``generations`` in the order of history."""
    kept: list[Consumed] = []
    rolled_back = 0
    for number, lines in enumerate(generations):
        end = min((later.start_step for later in history[number + 1 :]), default=None)
        good = [line for line in lines if end is None or line.step <= end]
        rolled_back += len(lines) - len(good)
        kept += good
    return kept, rolled_back


def audit(kept: Sequence[Consumed], rolled_back: int, run: RunConfig, num_samples: int) -> Audit:
    """Compare what was consumed with the order, step by step: the same samples, none twice, none missing."""
    train = run.train
    problems = []
    by_step: dict[int, list[Consumed]] = {}
    for line in kept:
        by_step.setdefault(line.step, []).append(line)
    problems += [f"step {step} is beyond the run" for step in sorted(by_step) if not 1 <= step <= train.train_steps]
    for step in range(1, train.train_steps + 1):
        lines = by_step.get(step, [])
        replicas = Counter(line.dp for line in lines)
        twice = [dp for dp, count in replicas.items() if count > 1]
        if twice:
            problems.append(f"step {step}: replica {twice[0]} consumed it {replicas[twice[0]]} times")
        expected = Counter(samples_of_step(step - 1, train.global_batch_size, num_samples, train.seed).tolist())
        taken = Counter(sample for line in lines for sample in line.samples)
        if taken != expected:
            missing, extra = sorted((expected - taken).elements()), sorted((taken - expected).elements())
            problems.append(f"step {step}: missing {missing[:8]}, not expected {extra[:8]}")
    return Audit(
        samples_each_once=not problems,
        steps=len(by_step),
        samples=sum(len(line.samples) for line in kept),
        rolled_back=rolled_back,
        problems=tuple(problems[:_LISTED_PROBLEMS]),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module's text for exit codes."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.data.audit", description="Check that a run consumed each sample exactly once."
    )
    parser.add_argument("--run-directory", required=True, type=Path, help="where the run's samples/ folder is")
    parser.add_argument("--history", required=True, help="JSON list of generations with their start_step")
    parser.add_argument("--run", required=True, help="the run's configuration as JSON")
    options = parser.parse_args(arguments)
    try:
        history = _histories.validate_json(options.history)
        run = RunConfig.model_validate_json(options.run)
        if not run.train.log_samples:
            raise ValueError("train.log_samples: the run wrote no sample logs")
        num_samples = check_corpus(run.data.path).num_samples(run.train.sequence_length)
        generations = [read_generation(options.run_directory, start.generation) for start in history]
    except (ValidationError, ValueError, KeyError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = audit(*surviving(history, generations), run, num_samples)
    print(json.dumps(asdict(result), separators=(",", ":")))
    return 0 if result.samples_each_once else 1


if __name__ == "__main__":
    sys.exit(main())
