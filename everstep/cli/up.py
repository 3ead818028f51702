"""``everstep up``: a cluster on this machine, in the foreground, until Ctrl-C."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from everstep.cli.interrupts import one_interrupt
from everstep.cli.local_cluster import ClusterSettings, LocalCluster
from everstep.cli.options import JsonOption
from everstep.cli.output import Output, answering

_CHECK_INTERVAL_S = 0.5


def up(
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=64, help="Node agents to start.")] = 4,
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", min=1, max=64, help="Devices of each node.")] = 2,
    device: Annotated[str, typer.Option("--device", help="Kind of device: cpu or cuda.")] = "cpu",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of the API; 0 picks a free one.")] = 8500,
    data_root: Annotated[
        Path, typer.Option("--data-root", help="Corpora, checkpoints and runs of jobs are below this directory.")
    ] = Path("runs"),
    state_dir: Annotated[
        Path | None,
        typer.Option("--state-dir", help="etcd's data, logs, token; DATA_ROOT/cluster when not given."),
    ] = None,
    lease_ttl: Annotated[
        int, typer.Option("--lease-ttl", min=2, help="Seconds after which a silent node counts as dead.")
    ] = 3,
    json_output: JsonOption = False,
) -> None:
    """Run etcd, the controller and node agents on this machine until Ctrl-C. Jobs survive a restart."""
    with answering(json_output) as out, one_interrupt():
        settings = ClusterSettings(
            state=(state_dir or data_root / "cluster").absolute(),
            data_root=data_root.absolute(),
            num_nodes=nodes,
            ranks_per_node=ranks_per_node,
            device=device,
            port=port,
            lease_ttl_s=lease_ttl,
        )
        try:
            with LocalCluster(settings, lambda name: out.say(f"[green]ready[/] {escape(name)}")) as cluster:
                cluster.start()
                out.say(f"[bold]{cluster.url}[/]  (API description: {cluster.url}/docs)")
                out.say(f"data root {settings.data_root}, logs {cluster.log_directory}; Ctrl-C ends everything")
                out.result({"url": cluster.url, "pids": cluster.pids, "data_root": str(settings.data_root)})
                _watch_over(cluster, out)
        except KeyboardInterrupt:
            out.say("everything has ended")


def _watch_over(cluster: LocalCluster, out: Output) -> None:
    """Until interrupted: end when etcd or the controller does; say when an agent does."""
    told: set[str] = set()
    while True:
        cluster.check()
        for name in cluster.ended_nodes():
            if name not in told:
                told.add(name)
                out.say(f"[yellow]the agent of {escape(name)} has ended[/]; its log is in {cluster.log_directory}")
        time.sleep(_CHECK_INTERVAL_S)
