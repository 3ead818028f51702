"""An error of the controller over one job: seen by whoever looks at that job, felt by no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.board import Board
from controller.reconcile import Action, reconcile
from controller.trouble import FIRST_DELAY_S, LONGEST_DELAY_S, Trouble
from controller.view import ClusterView, Job
from everstep.protocol.keys import Keys
from everstep.protocol.store import Change, KeyValue, Snapshot, StoreSettings
from tests.controller.running import running
from tests.coroutines import in_event_loop, until


def test_the_wait_doubles_until_a_look_goes_well() -> None:
    trouble = Trouble()
    waits = [trouble.failed("j", 100.0) - 100.0 for _ in range(8)]
    assert waits[:3] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S] and waits[-1] == LONGEST_DELAY_S
    trouble.over("j")
    assert trouble.not_before("j") == 0.0 and trouble.failed("j", 100.0) == 100.0 + FIRST_DELAY_S


@in_event_loop
async def test_one_job_in_trouble_stops_no_other(
    store_settings: StoreSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = True

    def stumbling(view: ClusterView, job: Job, *more: Any) -> Action:
        if broken and job.id.startswith("bad"):
            raise ZeroDivisionError("by nought")
        return reconcile(view, job, *more)

    monkeypatch.setattr("controller.loop.reconcile", stumbling)
    async with running(store_settings, tmp_path) as service:
        bad = await service.submit(name="bad", resources={"ranks": 2})

        async def told() -> bool:
            return "ZeroDivisionError: by nought" in (await service.show(bad))["reason"]

        await until(told)
        assert "Traceback" in caplog.text and bad in caplog.text
        await service.add_agents("a")
        good = await service.submit(name="good", resources={"ranks": 2})
        await service.reach(good, "RUNNING", 1)
        assert "everstep_controller_job_failures_total 0.0" not in (await service.api.get("/metrics")).text
        assert len(await service.events(bad, "controller_error")) == 1
        await service.api.post(f"/v1/jobs/{good}/cancel")
        await service.reach(good, "CANCELLED")
        broken = False
        detail = await service.reach(bad, "RUNNING", 1, timeout_s=12.0)
        assert "failed on this job" not in detail["reason"]
        assert [event.kind for event in await service.events(bad)].count("controller_error_over") == 1


def test_a_new_job_of_which_nothing_can_be_read_hurts_nobody() -> None:
    keys = Keys("/t")
    board = Board(keys)
    board.apply(Snapshot(1, ()))
    board.apply(Change(2, keys.spec("j"), KeyValue(keys.spec("j"), b"{", 2, 2)))
    assert keys.spec("j") in board.view.unreadable
