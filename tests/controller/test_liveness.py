"""Links to agents: what is wrong with one node's record is no matter of the others'."""

from __future__ import annotations

import asyncio

import pytest

from controller import liveness
from controller.board import Board
from controller.liveness import Liveness
from everstep.protocol.keys import Keys
from tests.controller.simulated_agent import TOKEN
from tests.controller.specs import node
from tests.coroutines import in_event_loop, until


@in_event_loop
async def test_a_port_that_cannot_be_is_told_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(liveness, "ASK_AGAIN_S", 0.01)
    following = asyncio.create_task(Liveness(Board(Keys("/t")), TOKEN)._follow(node("a", port=70000), asyncio.Event()))
    await until(lambda: caplog.text.count("link to a failed") > 1)
    assert not following.done() and "OverflowError" in caplog.text
    following.cancel()
