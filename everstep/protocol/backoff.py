"""Waiting between attempts."""

from __future__ import annotations

import asyncio
import random


class Backoff:
    """Waits that double from ``first_s`` up to ``cap_s``, spread by a quarter so that clients do not march in step."""

    def __init__(self, first_s: float = 0.05, cap_s: float = 1.0) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._next_s = first_s

    async def wait(self) -> None:
        """Sleep; the next wait is longer."""
        await asyncio.sleep(self._next_s * random.uniform(0.75, 1.0))
        self._next_s = min(2 * self._next_s, self._cap_s)

    def reset(self) -> None:
        """It worked: start again from the shortest wait."""
        self._next_s = self._first_s
