"""``everstep checkpoint``: one file for each of its commands."""

from __future__ import annotations

import typer

from everstep.cli.checkpoint_convert import convert
from everstep.cli.checkpoint_diff import diff_checkpoints
from everstep.cli.checkpoint_list import list_checkpoints
from everstep.cli.checkpoint_prune import prune_checkpoints
from everstep.cli.checkpoint_quarantine import quarantine_checkpoint
from everstep.cli.checkpoint_show import show_checkpoint
from everstep.cli.checkpoint_verify import verify_checkpoints

app = typer.Typer(name="checkpoint", help="Work on checkpoints in their directories.", no_args_is_help=True)
app.command("list")(list_checkpoints)
app.command("show")(show_checkpoint)
app.command("verify")(verify_checkpoints)
app.command("diff")(diff_checkpoints)
app.command("prune")(prune_checkpoints)
app.command("quarantine")(quarantine_checkpoint)
app.command()(convert)
