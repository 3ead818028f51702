"""The ``everstep`` command: one file for each of its commands."""

from __future__ import annotations

import typer

from everstep.cli.cancel import cancel
from everstep.cli.checkpoint import app as checkpoint
from everstep.cli.demo import demo
from everstep.cli.list_jobs import list_jobs
from everstep.cli.nodes import nodes
from everstep.cli.preprocess import preprocess
from everstep.cli.show import show
from everstep.cli.submit import submit
from everstep.cli.up import up
from everstep.cli.watch import watch

app = typer.Typer(
    name="everstep",
    help="Fault-tolerant elastic training of large Transformer models.",
    epilog="Exit codes: 0 done, 1 the job or the operation failed, 2 wrong usage or input, 3 no service, 130 Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(demo)
app.command()(up)
app.command()(submit)
app.command("list")(list_jobs)
app.command()(show)
app.command()(watch)
app.command()(cancel)
app.command()(nodes)
app.command()(preprocess)
app.add_typer(checkpoint)


def main() -> None:
    """Entry point of the installed command."""
    app()
