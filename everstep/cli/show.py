"""``everstep show``: everything about one job."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from everstep.cli.job_display import event_line, figures_of
from everstep.cli.options import DEFAULT_URL, JobArgument, JsonOption, UrlOption, client_of
from everstep.cli.output import answering
from everstep.client import Generation, JobDetail


def show(job: JobArgument, url: UrlOption = DEFAULT_URL, json_output: JsonOption = False) -> None:
    """Show one job: where it stands, its generations, its ranks and what happened to it."""
    with answering(json_output) as out, client_of(url) as client:
        detail, generations, events = client.job(job), client.generations(job), client.events(job)
        out.console.print(_summary(detail))
        if generations:
            out.console.print(_generations(generations))
        if detail.ranks:
            out.console.print(_ranks(detail))
        for event in events:
            out.console.print(event_line(event), soft_wrap=True)
        out.result(
            {
                "job": detail.model_dump(mode="json"),
                "generations": [generation.model_dump(mode="json") for generation in generations],
                "events": [event.model_dump(mode="json") for event in events],
            }
        )


def _summary(job: JobDetail) -> Table:
    table = Table.grid(padding=(0, 2))
    rows = {
        "job": job.id,
        "state": job.state.value,
        "reason": job.reason,
        "step": f"{job.step}/{job.train_steps}   {figures_of(job)}",
        "layout": f"{job.layout} on {job.num_ranks} ranks" if job.layout else "not placed",
        "restarts": str(job.restarts),
        "checkpoint": f"step {job.checkpoint.step}, {job.checkpoint.directory}" if job.checkpoint else "none yet",
        "run directory": job.run_directory,
    }
    for name, value in rows.items():
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _generations(generations: tuple[Generation, ...]) -> Table:
    table = Table("generation", "layout", "from step", "nodes", "reason")
    for one in generations:
        nodes = ", ".join(f"{placement.node}:{len(placement.ranks)}" for placement in one.placements)
        table.add_row(str(one.generation), str(one.layout), str(one.start_step), nodes, Text(one.reason))
    return table


def _ranks(job: JobDetail) -> Table:
    table = Table("rank", "phase", "step", "pid", "step s", "memory MiB")
    for rank in job.ranks:
        table.add_row(
            str(rank.rank),
            rank.phase,
            str(rank.step),
            str(rank.pid),
            f"{rank.step_s:.3f}" if rank.step_s is not None else "-",
            f"{rank.memory_bytes / 2**20:.0f}" if rank.memory_bytes is not None else "-",
        )
    return table
