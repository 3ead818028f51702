"""One link to each agent: its end is the quickest sign that a node died.

A link that ends, or a lease that ends, is followed by a question at the agent's endpoint: refused means dead now, an
answer means that only etcd was lost, silence leaves it to the lease.
"""

from __future__ import annotations

import asyncio
import logging
import time

from controller.board import Board
from controller.view import ClusterView, NodeVerdict
from everstep.protocol.link import LinkError, Verdict, hold, probe
from everstep.protocol.messages import NodeRecord

_log = logging.getLogger(__name__)

PROBE_S = 0.5
HOLD_AGAIN_S = 0.2
ASK_AGAIN_S = 1.0
REVIEW_S = 5.0


class Liveness:
    """Follows the view and keeps one task for each life of each agent."""

    def __init__(self, board: Board, token: str) -> None:
        self._board = board
        self._token = token

    async def run(self) -> None:
        """For ever; the links of nodes that nothing relies on any more are closed."""
        links: dict[tuple[str, str], tuple[asyncio.Task[None], asyncio.Event]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                view = self._board.view
                wanted = _wanted(view)
                for life in [life for life in links if life not in wanted]:
                    links.pop(life)[0].cancel()
                for life, record in wanted.items():
                    if life not in links:
                        left = asyncio.Event()
                        links[life] = (group.create_task(self._follow(record, left), name=f"link {record.node}"), left)
                    registered = view.nodes.get(record.node)
                    if registered is None or registered.incarnation != record.incarnation:
                        links[life][1].set()
                    else:
                        links[life][1].clear()
                look_again_at = time.monotonic() + REVIEW_S  # plans may have ceased to rely on who left
                while self._board.view.nodes is view.nodes and (left_s := look_again_at - time.monotonic()) > 0:
                    await self._board.changed(left_s)

    async def _follow(self, record: NodeRecord, left: asyncio.Event) -> None:
        """Hold the link while the agent is registered, ask when it ends, and go on asking once the agent has left."""
        while True:
            try:
                await self._follow_once(record, left)
            except Exception:
                # One node's record (a port that cannot be, say) must not end the links of the others.
                _log.exception("link to %s failed", record.node)
                await asyncio.sleep(ASK_AGAIN_S)

    async def _follow_once(self, record: NodeRecord, left: asyncio.Event) -> None:
        if not left.is_set():
            holding = asyncio.create_task(self._hold(record))
            leaving = asyncio.create_task(left.wait())
            try:
                await asyncio.wait({holding, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                holding.cancel()
                leaving.cancel()
        verdict = await self._ask(record)
        await asyncio.sleep(HOLD_AGAIN_S if verdict is Verdict.ALIVE and not left.is_set() else ASK_AGAIN_S)

    async def _hold(self, record: NodeRecord) -> None:
        try:
            await hold(record.host, record.port, self._token)
        except OSError as error:
            _log.info("link to %s: %s", record.node, error)
        except LinkError as error:
            _log.warning("link to %s: %s", record.node, error)
            await asyncio.sleep(ASK_AGAIN_S)

    async def _ask(self, record: NodeRecord) -> Verdict:
        try:
            verdict = await probe(record.host, record.port, self._token, PROBE_S, incarnation=record.incarnation)
        except LinkError as error:
            _log.warning("link to %s: %s", record.node, error)
            verdict = Verdict.ALIVE  # somebody is there and talks, though not to us
        self._board.take_verdict(record.node, NodeVerdict(record.incarnation, verdict, time.time()))
        return verdict


def _wanted(view: ClusterView) -> dict[tuple[str, str], NodeRecord]:
    """Lives of agents to follow: those registered, and those that left while a plan still relies on them."""
    wanted = {(record.node, record.incarnation): record for record in view.nodes.values()}
    relied_on = {
        (placement.node, placement.incarnation)
        for job in view.jobs.values()
        if job.active and job.plan is not None
        for placement in job.plan.placements
    }
    for seen in view.departed.values():
        life = (seen.value.node, seen.value.incarnation)
        if life in relied_on:
            wanted[life] = seen.value
    return wanted
