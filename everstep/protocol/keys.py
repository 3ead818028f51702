"""The keys in etcd, in one place. ``<root>`` is the cluster's prefix.

<root>/leader                               lease of the leading controller
<root>/nodes/<node>                         NodeRecord, lease of the agent
<root>/beats/<node>                         Heartbeat, lease of the agent
<root>/jobs/<job>/spec                      JobSpec
<root>/jobs/<job>/status                    JobStatus
<root>/jobs/<job>/plan                      Plan, the current one
<root>/jobs/<job>/plans/<generation>        Plan, every one
<root>/jobs/<job>/outcomes/<generation>/<node>   NodeOutcome
<root>/jobs/<job>/checkpoints/<step>.g<generation>  CheckpointRecord
<root>/jobs/<job>/events/<time>-<number>    Event
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """Key names below one root, such as ``/everstep``."""

    root: str = "/everstep"

    @property
    def leader(self) -> str:
        """Key of the leading controller."""
        return f"{self.root}/leader"

    @property
    def nodes(self) -> str:
        """Prefix of node records."""
        return f"{self.root}/nodes/"

    def node(self, node: str) -> str:
        """NodeRecord of one node."""
        return f"{self.nodes}{node}"

    @property
    def beats(self) -> str:
        """Prefix of heartbeats."""
        return f"{self.root}/beats/"

    def beat(self, node: str) -> str:
        """Heartbeat of one node."""
        return f"{self.beats}{node}"

    @property
    def jobs(self) -> str:
        """Prefix of everything about jobs."""
        return f"{self.root}/jobs/"

    def spec(self, job: str) -> str:
        """JobSpec."""
        return f"{self.jobs}{job}/spec"

    def status(self, job: str) -> str:
        """JobStatus."""
        return f"{self.jobs}{job}/status"

    def plan(self, job: str) -> str:
        """The current Plan."""
        return f"{self.jobs}{job}/plan"

    def plan_of(self, job: str, generation: int) -> str:
        """The Plan of one generation."""
        return f"{self.jobs}{job}/plans/{generation:08d}"

    def outcome(self, job: str, generation: int, node: str) -> str:
        """NodeOutcome of one node in one generation."""
        return f"{self.jobs}{job}/outcomes/{generation:08d}/{node}"

    def checkpoint(self, job: str, step: int, generation: int) -> str:
        """CheckpointRecord."""
        return f"{self.jobs}{job}/checkpoints/{step:09d}.g{generation}"

    def events(self, job: str) -> str:
        """Prefix of a job's events."""
        return f"{self.jobs}{job}/events/"

    def event(self, job: str, at: float, number: int) -> str:
        """One event; keys sort by time."""
        return f"{self.events(job)}{int(at * 1e6):018d}-{number:04d}"
