"""Metrics files of a run: the lines that belong to the history that survived."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.planning.messages import GenerationStart


def surviving_lines(run_directory: str, history: Sequence[GenerationStart], after: int = 0) -> list[dict[str, Any]]:
    """Lines of ``metrics/g*.jsonl`` by step, later than ``after``: a step that was done again counts as done last.

    Generation g keeps its steps up to the start of the first later generation that began before or there. A last line
    that is still being written is left out.
    """
    lines: dict[int, dict[str, Any]] = {}
    for start in sorted(history, key=lambda start: start.generation):
        lines = {step: line for step, line in lines.items() if step <= start.start_step}
        path = Path(run_directory) / "metrics" / f"g{start.generation:04d}.jsonl"
        if not path.exists():
            continue
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int) and line["step"] > start.start_step:
                lines[line["step"]] = line
    return [lines[step] for step in sorted(lines) if step > after]
