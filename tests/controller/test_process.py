"""``python -m controller`` as a process: ready file, SIGKILL and adoption, a quick hand-over on SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from everstep.protocol.keys import Keys
from everstep.protocol.store import Store, StoreSettings
from tests.controller.corpora import write_corpus
from tests.controller.simulated_agent import TOKEN, SimulatedAgent
from tests.controller.specs import spec_dict
from tests.coroutines import in_event_loop, until


class Process:
    def __init__(self, settings: StoreSettings, directory: Path) -> None:
        self.settings, self.directory = settings, directory
        self.ready_file = directory / "ready.json"
        write_corpus(directory / "data" / "corpus" / "tokens")
        token_file = directory / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(TOKEN)

    async def start(self) -> httpx.AsyncClient:
        """Start it; returns a client once it says that it serves."""
        self._spawn()
        ready: dict[str, Any] = json.loads((await until(self._ready, 20.0)).read_text())
        assert ready["pid"] == self.child.pid
        return httpx.AsyncClient(base_url=ready["url"])

    def _spawn(self) -> None:
        self.ready_file.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "controller", "--etcd", self.settings.endpoints[0], "--root", self.settings.root,
            "--port", "0", "--data-root", str(self.directory / "data"), "--token-file", str(self.directory / "token"),
            "--ready-file", str(self.ready_file), "--settle-s", "0.5",
        ]  # fmt: skip
        with (self.directory / "log").open("ab") as log:
            self.child = subprocess.Popen(command, stdout=log, stderr=log)

    def _ready(self) -> Path | None:
        assert self.child.poll() is None, (self.directory / "log").read_text()
        return self.ready_file if self.ready_file.exists() else None

    def end(self, number: signal.Signals) -> int:
        self.child.send_signal(number)
        return self.child.wait(timeout=10.0)


@pytest.fixture
def process(store_settings: StoreSettings, tmp_path: Path) -> Iterator[Process]:
    process = Process(store_settings, tmp_path)
    yield process
    if process.child.poll() is None:
        process.end(signal.SIGKILL)


async def state_of(api: httpx.AsyncClient, job: str) -> tuple[str, int, int]:
    answer = (await api.get(f"/v1/jobs/{job}")).json()
    return answer["state"], answer["generation"], answer["restarts"]


@in_event_loop
async def test_killed_and_started_again_it_adopts_the_job(process: Process) -> None:
    keys = Keys(process.settings.root)
    store = await Store.connect(process.settings)
    agents = [SimulatedAgent(store, keys, name) for name in ("a", "b")]
    for agent in agents:
        await agent.start()
    async with await process.start() as api:
        job = (await api.post("/v1/jobs", json=spec_dict())).json()["id"]

        async def runs() -> bool:
            return (await state_of(api, job))[0] == "RUNNING"

        await until(runs)
        process.end(signal.SIGKILL)
    async with await process.start() as api:
        # Reads are served while the predecessor's lease runs out.
        async def adopted() -> bool:
            answer = await api.get(f"/v1/jobs/{job}")
            return answer.status_code == 200

        await until(adopted)
        assert await state_of(api, job) == ("RUNNING", 1, 0)

        async def leads() -> bool:
            answer = await api.get("/readyz")
            return answer.status_code == 200 and bool(answer.json()["leader"])

        await until(leads)
        assert await state_of(api, job) == ("RUNNING", 1, 0)
        began = time.monotonic()
        assert process.end(signal.SIGTERM) == 0
        assert time.monotonic() - began < 3.0
        assert await store.get(keys.leader) is None  # the next one need not wait
    for agent in agents:
        await agent.close()
    await store.close()


def test_a_bad_command_line_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "controller", "--etcd", "127.0.0.1:1", "--token-file", os.devnull]
    answer = subprocess.run([*command, "--data-root", str(tmp_path / "nowhere")], capture_output=True, text=True)
    assert answer.returncode == 2 and "--data-root" in answer.stderr and "Traceback" not in answer.stderr
