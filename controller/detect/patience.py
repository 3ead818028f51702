"""How long detectors wait for a better explanation, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """Settings of the detectors.

    ``culprit_s``: a rank that failed in a collective may be the echo of another's death; wait this long for it.
    ``verdict_s``: a node's lease ended; wait this long for its endpoint's answer.
    ``listing_s``: after the controller's start a node named by a plan may be missing because it has not registered
    anew yet; wait this long.
    """

    culprit_s: float = 0.3
    verdict_s: float = 1.0
    listing_s: float = 3.0
