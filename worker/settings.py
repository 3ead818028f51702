"""The agent's settings: its command line, checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from everstep.protocol.link import read_token
from everstep.protocol.messages import Name
from everstep.protocol.store_options import add_store_options, store_settings_of
from everstep.protocol.store_settings import StoreSettings
from worker.preflight import DeviceChoice


@dataclass(frozen=True)
class AgentSettings:
    """How one agent is run. ``token`` opens the agent's endpoint."""

    node: str
    store: StoreSettings
    host: str
    devices: DeviceChoice
    state_dir: Path
    token: str
    lease_ttl_s: int
    ready_file: Path | None
    domain: str
    entry: str
    threads_per_rank: int
    log_level: str

    @property
    def rank_silence_limit_s(self) -> float:
        """After this long without a word from the agent a rank ends itself: longer than the lease, never hasty."""
        return max(3.0, 1.5 * self.lease_ttl_s)


def parse_settings(arguments: list[str] | None = None) -> AgentSettings:
    """Read the command line; ends the process with a message when something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m worker", description="Node agent of Everstep")
    parser.add_argument("--node", required=True, help="name of this node: lower case, digits, hyphens")
    add_store_options(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of this node for other nodes; nothing else listens"
    )
    parser.add_argument("--devices", required=True, help="cpu:N, cuda (all) or cuda:N")
    parser.add_argument("--state-dir", required=True, type=Path, help="logs, rank files, socket; one agent each")
    parser.add_argument("--token-file", required=True, type=Path, help="shared secret, mode 0600")
    parser.add_argument("--lease-ttl", default=2, type=int, help="seconds; etcd grants none below 2")
    parser.add_argument("--ready-file", type=Path, help="written when the node is registered")
    parser.add_argument("--domain", default="default", help="failure domain: rack, host, power")
    parser.add_argument("--entry", default="engine.rank:main", help="MODULE:FUNCTION that a rank runs")
    parser.add_argument("--threads-per-rank", default=1, type=int, help="threads of a rank's arithmetic on the CPU")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    given = parser.parse_args(arguments)
    try:
        if given.lease_ttl < 1:
            raise ValueError(f"--lease-ttl: {given.lease_ttl} is below 1")
        if given.threads_per_rank < 1:
            raise ValueError(f"--threads-per-rank: {given.threads_per_rank} is below 1")
        if ":" not in given.entry:
            raise ValueError(f"--entry: {given.entry!r} is not MODULE:FUNCTION")
        return AgentSettings(
            node=_node_name(given.node),
            store=store_settings_of(given),
            host=given.host,
            devices=DeviceChoice.parse(given.devices),
            state_dir=given.state_dir.absolute(),
            token=read_token(given.token_file),
            lease_ttl_s=given.lease_ttl,
            ready_file=given.ready_file,
            domain=given.domain,
            entry=given.entry,
            threads_per_rank=given.threads_per_rank,
            log_level=given.log_level,
        )
    except ValueError as error:
        parser.error(str(error))


def _node_name(name: str) -> str:
    try:
        return TypeAdapter(Name).validate_python(name)
    except ValidationError:
        raise ValueError(f"--node: {name!r} is not lower case letters, digits and hyphens") from None
