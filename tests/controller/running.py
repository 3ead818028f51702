"""A controller in the test's own event loop, with its API in process, simulated agents, and a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from controller.app import create_app
from controller.decide import Policy
from controller.service import Controller, Settings
from everstep.protocol.keys import Keys
from everstep.protocol.messages import Event
from everstep.protocol.store import Store, StoreSettings
from tests.controller.corpora import write_corpus
from tests.controller.simulated_agent import TOKEN, SimulatedAgent
from tests.controller.specs import spec_dict
from tests.coroutines import until


@dataclass
class Running:
    """What a test drives."""

    controller: Controller
    api: httpx.AsyncClient
    store: Store
    keys: Keys
    data_root: Path
    agents: dict[str, SimulatedAgent] = field(default_factory=dict)

    async def add_agents(self, names: str, **more: Any) -> None:
        """Start agents and wait until the controller gives them work."""
        for name in names.split():
            self.agents[name] = SimulatedAgent(self.store, self.keys, name, **more)
            await self.agents[name].start()
        await until(lambda: all(self.controller.board.view.healthy(name) for name in names.split()))

    async def submit(self, **changes: Any) -> str:
        """Submit the standard spec with changes; returns the job's id."""
        answer = await self.api.post("/v1/jobs", json=spec_dict(**changes))
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def show(self, job: str) -> dict[str, Any]:
        """The job as the API tells it."""
        answer = await self.api.get(f"/v1/jobs/{job}")
        assert answer.status_code == 200, answer.text
        detail: dict[str, Any] = answer.json()
        return detail

    async def reach(
        self, job: str, state: str, generation: int | None = None, timeout_s: float = 8.0
    ) -> dict[str, Any]:
        """Wait for a state (of a generation); returns the job then."""

        async def there() -> dict[str, Any] | None:
            detail = await self.show(job)
            return detail if detail["state"] == state and generation in (None, detail["generation"]) else None

        try:
            found: dict[str, Any] = await until(there, timeout_s)
        except TimeoutError:
            raise AssertionError(f"not {state} (generation {generation}) but: {await self.show(job)}") from None
        return found

    async def events(self, job: str, kind: str | None = None) -> list[Event]:
        """Events of the job, of one kind or all."""
        answer = (await self.api.get(f"/v1/jobs/{job}/events")).json()
        return [e for e in map(Event.model_validate, answer["events"]) if kind in (None, e.kind)]


@contextlib.asynccontextmanager
async def running(settings: StoreSettings, tmp_path: Path, **more: Any) -> AsyncIterator[Running]:
    """A controller that leads; everything is ended on the way out."""
    write_corpus(tmp_path / "corpus" / "tokens")
    api_token = more.pop("api_token", None)
    policy = more.pop("policy", Policy(settle_s=0.3))
    keys = Keys(settings.root)
    store, own = await Store.connect(settings), await Store.connect(settings)
    controller = Controller(own, keys, Settings(tmp_path, TOKEN, api_token=api_token, policy=policy))
    task = asyncio.create_task(controller.run())
    transport = httpx.ASGITransport(app=create_app(controller))
    async with httpx.AsyncClient(transport=transport, base_url="http://controller") as api:
        environment = Running(controller, api, store, keys, tmp_path)
        try:
            assert await controller.leadership.held_within(10.0)
            await until(lambda: controller.board.view.synced_at)
            yield environment
        finally:
            for agent in environment.agents.values():
                await agent.close()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await own.close()
            await store.close()
