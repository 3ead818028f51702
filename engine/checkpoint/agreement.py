"""How the ranks tell each other what they did: JSON as bytes through two all-gathers, and a failure reaches everybody.

Chosen over one side file a rank: it also carries failures, needs no second kind of file whose visibility between
nodes a shared file system does not promise, and is the same on an object store. Each rank's part is a few hundred
bytes a box.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from engine.checkpoint.errors import CheckpointError, from_json
from engine.groups import Group

T = TypeVar("T")


def exchange(group: Group, value: Any, device: torch.device) -> list[Any]:
    """Every member's ``value`` (anything that JSON can hold), in the order of the group. ``device``: the group's."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    lengths = torch.empty(group.size, dtype=torch.int64, device=device)
    group.all_gather(lengths, torch.tensor([len(mine)], dtype=torch.int64, device=device)).wait()
    sizes = lengths.tolist()
    longest = max(sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(mine)] = mine
    everything = torch.empty(group.size * longest, dtype=torch.uint8, device=device)
    group.all_gather(everything, padded).wait()
    raw = everything.cpu().numpy()
    return [json.loads(raw[i * longest : i * longest + size].tobytes()) for i, size in enumerate(sizes)]


def agree(group: Group, device: torch.device, attempt: Callable[[], T]) -> list[T]:
    """Run ``attempt`` on every member, then tell all; returns what each one returned (it has to fit in JSON).

    When it raised on any member, all members raise: the error of the first one, as that member's own exception where
    it is one of ours, ``elsewhere`` on members that did not fail themselves. So no member waits for one that failed.
    """
    cause: Exception | None = None
    outcome: dict[str, Any]
    try:
        outcome = {"value": attempt()}
    except CheckpointError as error:
        cause, outcome = error, {"error": error.to_json()}
    except Exception as error:  # told to every rank and raised below
        cause, outcome = error, {"error": CheckpointError(f"{type(error).__name__}: {error}").to_json()}
    outcomes = exchange(group, outcome, device)
    for failed in outcomes:
        if "error" in failed:
            told = from_json(failed["error"])
            told.elsewhere = cause is None
            raise told from cause
    return [o["value"] for o in outcomes]
