"""``everstep nodes``."""

from __future__ import annotations

from rich.table import Table

from everstep.cli.options import DEFAULT_URL, JsonOption, UrlOption, client_of
from everstep.cli.output import answering


def nodes(url: UrlOption = DEFAULT_URL, json_output: JsonOption = False) -> None:
    """List nodes with their devices and what they work on."""
    with answering(json_output) as out, client_of(url) as client:
        found = client.nodes()
        table = Table("node", "state", "address", "devices", "memory GiB", "ranks", "jobs", "last beat s")
        for node in found:
            kinds = {device.kind for device in node.devices}
            table.add_row(
                node.node,
                node.state,
                f"{node.host}:{node.port}",
                f"{len(node.devices)} {'/'.join(sorted(kinds))}",
                f"{sum(device.memory_bytes for device in node.devices) / 2**30:.1f}",
                str(len(node.ranks)),
                ", ".join(node.jobs) or "-",
                f"{node.beat_age_s:.1f}" if node.beat_age_s is not None else "-",
            )
        out.console.print(table if found else "no nodes")
        out.result({"nodes": [node.model_dump(mode="json") for node in found]})
