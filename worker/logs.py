"""Logs: the agent's own as JSON lines on standard error, and keeping the ranks' files from growing without end."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

_LARGEST_LOG_BYTES = 32 << 20
_LOOK_S = 10.0

_log = structlog.get_logger()


def configure_logs(level: str, node: str) -> None:
    """Send structured logs to standard error, one JSON object a line, each with the node's name."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(node=node)


def rotate(log: Path, largest_bytes: int = _LARGEST_LOG_BYTES) -> bool:
    """Move a log that has grown too large to ``NAME.1``; True when it did.

    Its writer keeps the file open for appending, so the contents are copied and the file is cut to nothing. Lines that
    come between the two steps are lost.
    """
    try:
        if log.stat().st_size <= largest_bytes:
            return False
    except FileNotFoundError:
        return False
    shutil.copyfile(log, log.with_name(log.name + ".1"))
    os.truncate(log, 0)
    return True


async def keep_rotating(logs: Callable[[], Iterable[Path]]) -> None:
    """Look at the logs now and then, for ever."""
    while True:
        await asyncio.sleep(_LOOK_S)
        for log in list(logs()):
            try:
                await asyncio.to_thread(rotate, log)
            except OSError as error:
                # A full disk must not end the agent and, with it, its ranks.
                _log.warning("a log cannot be rotated", path=str(log), error=str(error))
