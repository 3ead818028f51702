"""The running controller: its settings, its parts, and the tasks that keep it going."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

from controller.board import Board
from controller.decide import Policy
from controller.leader import Leadership
from controller.liveness import Liveness
from controller.loop import Loop
from controller.metrics import Metrics
from controller.observe import observe
from everstep.protocol.keys import Keys
from everstep.protocol.store import Store

STALE_AFTER_S = 3.0


@dataclass(frozen=True)
class Settings:
    """What the controller is started with. All paths of specs resolve below ``data_root``."""

    data_root: Path
    agent_token: str = field(repr=False)
    lease_ttl_s: int = 2
    api_token: str | None = field(default=None, repr=False)
    policy: Policy = field(default_factory=Policy)


class Controller:
    """Everything that one controller process holds; ``run`` keeps it going."""

    def __init__(self, store: Store, keys: Keys, settings: Settings) -> None:
        self.store = store
        self.keys = keys
        self.settings = settings
        self.board = Board(keys)
        self.metrics = Metrics(self.board)
        identity = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.leadership = Leadership(store, keys, self.board, identity=identity, ttl_s=settings.lease_ttl_s)
        self._loop = Loop(self.board, self.leadership, keys, settings.policy, self.metrics)
        self._liveness = Liveness(self.board, settings.agent_token)

    @property
    def stale(self) -> bool:
        """Whether etcd has not been heard lately, so that the view may be old."""
        silence_s = self.store.silence_s
        return self.board.view.synced_at is None or silence_s is None or silence_s > STALE_AFTER_S

    async def run(self) -> None:
        """For ever; the failure of any part ends all of them and is raised."""
        async with asyncio.TaskGroup() as group:
            group.create_task(observe(self.store, self.keys, self.board), name="observe")
            group.create_task(self.leadership.run(), name="leadership")
            group.create_task(self._liveness.run(), name="liveness")
            group.create_task(self._loop.run(), name="loop")
