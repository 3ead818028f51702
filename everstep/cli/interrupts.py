"""Ctrl-C and SIGTERM for commands that run something: the first ends the work, the clean end is not disturbed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Within the block the first SIGINT or SIGTERM raises KeyboardInterrupt; later ones are ignored.

    A second Ctrl-C therefore cannot break off the stopping of processes, which has deadlines of its own.
    """
    interrupted = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
