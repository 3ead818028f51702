"""Run an agent as a program: signals in, exit code out."""

from __future__ import annotations

import asyncio
import signal

import structlog

from everstep.protocol.store import StoreError
from worker.agent import Agent
from worker.logs import configure_logs
from worker.registration import NameTaken
from worker.settings import AgentSettings
from worker.state_dir import StateDir
from worker.warm_client import HelperFailed, WarmParentLost

log = structlog.get_logger()


def run_agent(settings: AgentSettings, state: StateDir, guardian: int) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code (see ``worker.__main__``)."""
    configure_logs(settings.log_level, settings.node)
    codes: list[int] = []
    try:
        asyncio.run(_serve(Agent(settings, state, guardian)))
    except* NameTaken as taken:
        codes.append(_tell(taken, 3))
    except* (WarmParentLost, HelperFailed) as unusable:
        codes.append(_tell(unusable, 4))
    except* StoreError as refused:
        codes.append(_tell(refused, 5))
    return codes[0] if codes else 0


async def _serve(agent: Agent) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await agent.run(stop)


def _tell(group: BaseExceptionGroup[Exception], code: int) -> int:
    for error in group.exceptions:
        log.error("the agent ends", error=str(error))
    return code
