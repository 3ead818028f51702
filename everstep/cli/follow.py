"""Following one job over REST: its state, its new events and the nodes, again and again."""

from __future__ import annotations

import time
from dataclasses import dataclass

from everstep.client import ApiError, Client, JobDetail, NodeView, ServiceUnreachable
from everstep.protocol.messages import Event

PATIENCE_S = 60.0
"""How long the service may be away (a controller that is replaced, say)."""
_LATE_EVENTS_S = 10.0
"""Events of several writers may arrive out of order by this much."""


@dataclass(frozen=True)
class Tick:
    """One look: the job, the events that were not seen before, the nodes."""

    job: JobDetail
    new_events: tuple[Event, ...]
    nodes: tuple[NodeView, ...]


class Follower:
    """Looks at a job, again and again."""

    def __init__(self, client: Client, job: str) -> None:
        self._client = client
        self._job = job
        self._away_since: float | None = None
        self._seen: set[tuple[float, str, str]] = set()
        self._newest = 0.0

    def poll(self) -> Tick | None:
        """What is new; None while the service is away. Raises what the client raises when it stays away."""
        try:
            tick = self._look()
        except (ServiceUnreachable, ApiError) as error:
            if isinstance(error, ApiError) and error.status != 503:
                raise
            now = time.monotonic()
            self._away_since = self._away_since or now
            if now - self._away_since > PATIENCE_S:
                raise
            return None
        self._away_since = None
        return tick

    def _look(self) -> Tick:
        # The job first: when it has ended, the events asked for afterwards are all of them.
        job = self._client.job(self._job)
        events = self._client.events(self._job, after=max(0.0, self._newest - _LATE_EVENTS_S))
        new = tuple(event for event in events if (event.at, event.kind, event.message) not in self._seen)
        nodes = self._client.nodes()
        self._seen |= {(event.at, event.kind, event.message) for event in new}
        self._newest = max([self._newest, *(event.at for event in new)])
        return Tick(job, new, nodes)
