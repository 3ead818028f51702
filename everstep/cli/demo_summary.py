"""The demo's last screen."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from everstep.cli.demo_report import LOSS_BOUND, SPLIT
from everstep.cli.output import Output


def print_summary(out: Output, summary: dict[str, Any]) -> None:
    """Print the summary for people: what was claimed, what it cost, where the files are."""
    out.console.rule("summary")
    out.console.print(_claims(summary))
    out.console.print(_recoveries(summary["recoveries"]))
    for problem in summary["problems"]:
        out.console.print(Text(problem, style="red"))
    paths = summary["paths"]
    out.say(f"[dim]metrics, one JSON line a step:[/] {escape(paths['metrics'])}")
    out.say(f"[dim]summary.json, samples, checkpoints, logs:[/] {escape(paths['directory'])}")


def _claims(summary: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))

    def row(good: bool | None, text: str) -> None:
        mark = Text("-", "dim") if good is None else Text("✔", "green") if good else Text("✘", "bold red")
        table.add_row(mark, Text(text))

    layouts = " → ".join(f"{one['layout']} (from step {one['start_step']})" for one in summary["layouts"])
    row(summary["finished"], f"{summary['steps']} steps, loss {summary['loss_first']:.3f} → {summary['loss_last']:.3f}")
    row(None, f"layouts: {layouts}")
    row(
        summary["samples_each_once"],
        f"each of {summary['samples']:,} samples consumed exactly once in the surviving history "
        f"({summary['steps_done_again']} steps were rolled back and done again)",
    )
    difference = summary["max_relative_loss_difference"]
    if summary["twin_seconds"] is None:
        row(None, "no twin to compare with")
    else:
        told = "cannot be compared" if difference is None else f"largest relative difference {difference:.1e}"
        row(
            difference is not None and difference <= LOSS_BOUND,
            f"loss of every step against the undisturbed twin: {told}",
        )
    return table


def _recoveries(recoveries: list[dict[str, Any]]) -> Table:
    """One column a recovery, one row a phase."""
    names = {"node_lost": "node lost", "grow": "growth (pause)"}
    table = Table("", *(names.get(one["kind"], one["kind"]) for one in recoveries))
    table.add_row("layout", *(f"{one['from_layout']} → {one['to_layout']}" for one in recoveries))
    table.add_row("steps lost", *(str(one["steps_lost"]) for one in recoveries))
    table.add_row("seconds", *(f"{one['seconds']:.2f}" for one in recoveries), style="bold", end_section=True)
    for phase in (*SPLIT, "other"):
        table.add_row(phase.replace("_", " "), *(f"{one['split'][phase]:.2f}" for one in recoveries))
    return table
