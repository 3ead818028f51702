"""A job on the screen while it runs: events as they come, below them progress, loss, speed, layout and ranks.

On a terminal the lower part is redrawn in place; elsewhere a line is printed every few steps.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from everstep.cli.follow import Tick
from everstep.cli.output import Output
from everstep.client import JobDetail, NodeView
from everstep.protocol.messages import Event

_STATE_STYLE = {
    "QUEUED": "yellow",
    "STARTING": "yellow",
    "RUNNING": "green",
    "RECOVERING": "bold magenta",
    "SUCCEEDED": "bold green",
    "FAILED": "bold red",
    "CANCELLED": "red",
}
_EVENT_STYLE = {
    "incident": "bold red",
    "planned": "cyan",
    "recovered": "bold green",
    "failed": "bold red",
    "save_failed": "bold red",
}
_PHASE_MARK = {"stepping": ("■", "green"), "saving": ("▣", "blue"), "ended": ("□", "dim")}
_PLAIN_LINES = 15  # lines of progress of a whole run where nothing can be redrawn


def clock(at: float) -> str:
    """Wall-clock time of day."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def figures_of(job: JobDetail) -> str:
    """Loss, speed and utilisation, as far as they are known."""
    parts = [f"loss {job.loss:.4f}"] if job.loss is not None else []
    if job.tokens_per_s is not None:
        parts.append(f"{job.tokens_per_s:,.0f} tokens/s")
    if job.mfu is not None:
        parts.append(f"MFU {100 * job.mfu:.1f} %")
    return "   ".join(parts)


def event_line(event: Event) -> Text:
    """One event on one line."""
    kind = Text(f"{event.kind:<10}", style=_EVENT_STYLE.get(event.kind, "bold"))
    return Text.assemble((clock(event.at), "dim"), "  ", kind, " ", event.message)


def _ranks_of(node: NodeView, job: JobDetail) -> Text:
    text = Text(f"{node.node} ", style="" if node.state == "ready" else "red")
    if node.state != "ready":
        return text.append(f"({node.state})", style="red")
    mine = [rank for rank in node.ranks if rank.job == job.id and rank.generation == job.generation]
    for rank in sorted(mine, key=lambda rank: rank.rank):
        mark, style = _PHASE_MARK.get(rank.phase, ("◌", "yellow"))
        text.append(mark, style=style)
    return text.append("·" * (len(node.devices) - len(mine)), style="dim")


def _panel(job: JobDetail, nodes: tuple[NodeView, ...], figures: str) -> RenderableType:
    state = Text(job.state.value, style=_STATE_STYLE.get(job.state.value, ""))
    layout = f"{job.layout} on {job.num_ranks} ranks" if job.layout else "no layout yet"
    head = Text.assemble(state, f"  {job.id}  generation {job.generation}  {layout}")
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        ProgressBar(total=job.train_steps, completed=job.step, width=40),
        f"step {job.step}/{job.train_steps}",
        figures,
    )
    ranks = Text("  ").join([_ranks_of(node, job) for node in nodes])
    return Group(head, bar, ranks)


class JobDisplay:
    """Shows ticks. Use as a context manager."""

    def __init__(self, output: Output) -> None:
        self._console = output.console
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._next_plain_step = 0
        self._figures = ""  # the last known: ranks that save or restore tell none
        self._away = False

    def note(self, text: str) -> None:
        """A remark of the command's own among the events; rich markup is understood."""
        self._console.print(f"[dim]{clock(time.time())}[/]  {text}", soft_wrap=True)

    def show(self, tick: Tick | None) -> None:
        """Show a look at the job; None says that the service is away."""
        if tick is None:
            if not self._away:
                self.note("[yellow]the service does not answer; trying again[/]")
            self._away = True
            return
        self._away = False
        self._figures = figures_of(tick.job) or self._figures
        for event in tick.new_events:
            self._console.print(event_line(event), soft_wrap=True)
        if self._live is not None:
            self._live.update(_panel(tick.job, tick.nodes, self._figures))
        else:
            self._plain(tick.job)

    def _plain(self, job: JobDetail) -> None:
        if job.loss is None or job.step < self._next_plain_step:
            return
        self._next_plain_step = job.step + max(1, job.train_steps // _PLAIN_LINES)
        self.note(f"step {job.step}/{job.train_steps}  {escape(str(job.layout))}  {figures_of(job)}")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
