"""What a detector says: an incident, or a suspicion that wants another look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

IncidentKind = Literal["dead_rank", "dead_node", "user_error", "damaged_checkpoint"]


@dataclass(frozen=True)
class Incident:
    """One fault of one generation, with its culprit.

    ``at``: the best known time of the fault, ``seen_at``: when the controller knew. ``checkpoint``: directory of the
    checkpoint that proved damaged.
    """

    kind: IncidentKind
    job: str
    generation: int
    at: float
    seen_at: float
    message: str
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    checkpoint: str | None = None


@dataclass(frozen=True)
class Suspicion:
    """Something looks wrong but may have a cause still to be seen: look again at ``until``."""

    until: float
    message: str


Finding = Incident | Suspicion
