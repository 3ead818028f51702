"""The ends of ranks that were faults of their own, in order of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from controller.view import Seen
from engine.planning.messages import EXIT_AGENT_SILENT
from everstep.protocol.messages import NodeOutcome, RankExit

LONGEST_TEXT = 1000


@dataclass(frozen=True)
class RankFault:
    """One rank that ended by a fault, where, and when the controller heard of it."""

    node: str
    exit: RankExit
    seen_at: float

    @property
    def is_echo(self) -> bool:
        """Whether this end is what the death of somebody else looks like from here."""
        if self.exit.exit_code == EXIT_AGENT_SILENT:
            return True
        return self.exit.failure is not None and self.exit.failure.category == "collective"

    def describe(self) -> str:
        """Rank, node, step and cause, in one line; says no more than the evidence does."""
        end = self.exit
        where = f"rank {end.rank} on {self.node} at step {end.step}"
        if end.failure is not None:
            return f"{where}: {end.failure.error}: {shortened(end.failure.message)}"
        if end.cause:
            return f"{where}: {end.cause}"
        if end.signal is not None:
            return f"{where}: killed by signal {end.signal}, cause unknown"
        return f"{where}: exit code {end.exit_code}"


def shortened(text: str) -> str:
    """The beginning: what is said of all ranks has to fit into one etcd value. The rank's log has the whole text."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ... ({len(text)} characters)"


def rank_faults(outcomes: Mapping[str, Seen[NodeOutcome]]) -> list[RankFault]:
    """Faults among the outcomes of one generation (by node), earliest first."""
    faults = [
        RankFault(node, end, seen.at) for node, seen in outcomes.items() for end in seen.value.exits if end.is_fault
    ]
    return sorted(faults, key=lambda fault: (fault.exit.at, fault.exit.rank))
