"""A controller with a real etcd and simulated agents: what happens to a job, told by the API."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from everstep.protocol.messages import RankExit
from everstep.protocol.store import StoreSettings
from tests.controller.running import Running, running
from tests.coroutines import in_event_loop, until


async def started(service: Running, nodes: str = "a b", **changes: Any) -> str:
    await service.add_agents(nodes)
    job = await service.submit(**changes)
    await service.reach(job, "RUNNING", 1)
    await until(lambda: all(service.agents[name].plan for name in nodes.split()))  # one rank's step makes it RUNNING
    return job


def placed_on(detail: dict[str, Any]) -> set[str]:
    return {placement["node"] for placement in detail["plan"]["placements"]}


@in_event_loop
async def test_a_job_is_placed_runs_and_succeeds(store_settings: StoreSettings, tmp_path: Path) -> None:
    async with running(store_settings, tmp_path) as service:
        job = await started(service)
        detail = await service.show(job)
        assert detail["layout"]["dp"] == 4 and detail["num_ranks"] == 4
        assert (detail["step"], detail["consumed_samples"], detail["loss"]) == (1, 8, 2.5)
        assert detail["spec"]["data"]["path"] == str(tmp_path / "corpus" / "tokens")
        assert detail["run_directory"] == str(tmp_path / "runs" / job)
        plan = service.agents["a"].plan
        assert plan is not None
        assert plan.meeting.prefix == f"{job}/g1" and plan.meeting.port == 9
        assert plan.run.checkpoint.directory == f"{detail['run_directory']}/checkpoints"
        for agent in service.agents.values():
            first = 0 in agent.placement.ranks
            await agent.end_ranks(*agent.exits(complete=True, step=1000), run_complete=first)
        detail = await service.reach(job, "SUCCEEDED", 1)
        assert detail["step"] == 1000
        assert [e.kind for e in await service.events(job)] == ["submitted", "planned", "running", "succeeded"]


@in_event_loop
async def test_a_rank_fault_gives_exactly_one_new_generation(store_settings: StoreSettings, tmp_path: Path) -> None:
    async with running(store_settings, tmp_path) as service:
        job = await started(service)
        for agent in service.agents.values():
            agent.steps_done = 17
            await agent.report()
        await service.agents["a"].save(10)
        await until(lambda: service.controller.board.view.step_of(service.controller.board.view.jobs[job]) == 17)
        at = time.time()
        victim = service.agents["b"]
        dead = RankExit(rank=2, pid=1, signal=9, at=at, step=17, cause="killed by signal 9, cause unknown")
        await victim.end_ranks(dead, all_gone=False)
        for agent in service.agents.values():
            agent.steps_done = 1
        detail = await service.reach(job, "RUNNING", 2)
        assert (detail["restarts"], detail["plan"]["start_step"], detail["incident"]) == (1, 10, None)
        await asyncio.sleep(0.3)
        generations = (await service.api.get(f"/v1/jobs/{job}/generations")).json()["generations"]
        assert [g["generation"] for g in generations] == [1, 2]
        [incident] = await service.events(job, "incident")
        assert incident.data["ranks"] == [2] and "killed by signal 9" in incident.message
        [recovered] = await service.events(job, "recovered")
        assert recovered.data["kind"] == "dead_rank" and recovered.data["steps_lost"] == 7
        split = recovered.data["split"]
        assert {"detect", "decide", "stop", "start", "meet", "build", "restore", "first_step"} <= set(split)
        assert abs(sum(split.values()) - recovered.data["seconds"]) < 0.2
        latency = generations[1]["created_at"] - at
        print(f"rank end written to plan made: {1000 * latency:.1f} ms")
        assert latency < 0.5


@in_event_loop
async def test_a_killed_agent_is_replaced_then_taken_back(store_settings: StoreSettings, tmp_path: Path) -> None:
    async with running(store_settings, tmp_path) as service:
        job = await started(service, "a b c d")
        at = time.time()
        await service.agents["b"].die()
        detail = await service.reach(job, "RUNNING", 2)
        assert placed_on(detail) == {"a", "c", "d"}
        assert detail["plan"]["created_at"] - at < 1.0  # the link told, the lease still lived
        [incident] = await service.events(job, "incident")
        assert (incident.data["kind"], incident.data["nodes"]) == ("dead_node", ["b"])
        await service.agents["b"].close()
        await service.add_agents("b")
        detail = await service.reach(job, "RUNNING", 3)
        assert placed_on(detail) == {"a", "b", "c", "d"}
        assert detail["restarts"] == 1 and detail["plan"]["start_step"] > 0
        grown = (await service.events(job, "recovered"))[-1]
        assert (grown.data["kind"], grown.data["steps_lost"]) == ("grow", 0)
        kinds = [e.kind for e in await service.events(job)]
        assert kinds[-3:] == ["draining", "planned", "recovered"]


@in_event_loop
async def test_a_silent_node_dies_with_its_lease(store_settings: StoreSettings, tmp_path: Path) -> None:
    async with running(store_settings, tmp_path) as service:
        job = await started(service)
        await service.agents["a"].fall_silent()
        detail = await service.reach(job, "RUNNING", 2)
        assert placed_on(detail) == {"b"}
        [incident] = await service.events(job, "incident")
        assert "lease ended" in incident.message


@in_event_loop
async def test_leases_that_end_while_agents_answer_harm_nobody(store_settings: StoreSettings, tmp_path: Path) -> None:
    async with running(store_settings, tmp_path) as service:
        job = await started(service)
        for agent in service.agents.values():
            await agent.lose_lease()
        await until(lambda: not service.controller.board.view.nodes)
        await asyncio.sleep(1.5)
        for agent in service.agents.values():
            await agent.register()
            await agent.report()
        await asyncio.sleep(0.3)
        detail = await service.show(job)
        assert (detail["state"], detail["generation"], detail["restarts"]) == ("RUNNING", 1, 0)
        at = time.time()
        await service.agents["a"].die()  # its link is held again, or asked again within a second
        detail = await service.reach(job, "RUNNING", 2)
        assert detail["plan"]["created_at"] - at < 1.5


@in_event_loop
async def test_a_death_while_draining_is_a_fault(store_settings: StoreSettings, tmp_path: Path) -> None:
    async with running(store_settings, tmp_path) as service:
        job = await started(service)
        service.agents["b"]._following.cancel()  # it will not hear that it should save and end
        await service.add_agents("c d")
        await until(lambda: service.controller.board.view.jobs[job].plan.stop == "save")  # type: ignore[union-attr]
        await service.agents["b"].die()
        detail = await service.reach(job, "RUNNING", 2)
        assert placed_on(detail) == {"a", "c", "d"} and detail["restarts"] == 1
        assert [e.data["kind"] for e in await service.events(job, "recovered")] == ["dead_node"]


@in_event_loop
async def test_too_few_ranks_wait_for_a_node(store_settings: StoreSettings, tmp_path: Path) -> None:
    async with running(store_settings, tmp_path) as service:
        job = await started(service, resources={"min_ranks": 4})
        await service.agents["b"].die()
        detail = await service.reach(job, "RECOVERING", 1)
        assert "at least 4 ranks" in detail["reason"]
        await until(lambda: any(o.all_gone for o in service.agents["a"].outcomes))  # the survivors were ended
        await service.agents["b"].close()
        await service.add_agents("b")
        detail = await service.reach(job, "RUNNING", 2)
        assert detail["restarts"] == 1


@in_event_loop
async def test_a_user_error_fails_the_job_at_once(store_settings: StoreSettings, tmp_path: Path) -> None:
    async with running(store_settings, tmp_path) as service:
        job = await started(service)
        agent = service.agents["a"]
        failure = {
            "rank": 0, "generation": 1, "category": "user", "error": "FileNotFoundError",
            "message": "no such file: /nowhere", "traceback": "", "at": time.time(),
        }  # fmt: skip
        end = RankExit.model_validate(
            {"rank": 0, "pid": 1, "exit_code": 10, "failure": failure, "at": time.time(), "step": 0}
        )
        await agent.end_ranks(end, all_gone=False)
        detail = await service.reach(job, "FAILED", 1)
        assert detail["reason"] == "rank 0 after 0 steps: FileNotFoundError: no such file: /nowhere"
        [incident] = await service.events(job, "incident")
        assert incident.data["nodes"] == []
        await until(lambda: service.agents["b"].outcomes)  # nobody goes on


@in_event_loop
async def test_cancel_ends_the_ranks_first(store_settings: StoreSettings, tmp_path: Path) -> None:
    async with running(store_settings, tmp_path) as service:
        job = await started(service)
        answer = await service.api.post(f"/v1/jobs/{job}/cancel")
        assert answer.status_code == 202 and answer.json()["cancel_requested"]
        await service.reach(job, "CANCELLED", 1)
        assert all(agent.outcomes[-1].all_gone for agent in service.agents.values())
        again = await service.api.post(f"/v1/jobs/{job}/cancel")
        assert again.status_code == 409


@in_event_loop
async def test_jobs_queue_and_a_queued_one_is_cancelled_at_once(store_settings: StoreSettings, tmp_path: Path) -> None:
    async with running(store_settings, tmp_path) as service:
        first = await started(service)
        second, third = await service.submit(name="second"), await service.submit(name="third")
        assert (await service.show(second))["state"] == "QUEUED"
        answer = await service.api.post(f"/v1/jobs/{second}/cancel")
        assert answer.json()["state"] == "CANCELLED"
        await service.api.post(f"/v1/jobs/{first}/cancel")
        detail = await service.reach(third, "RUNNING", 1)
        assert placed_on(detail) == {"a", "b"}
        listed = (await service.api.get("/v1/jobs")).json()["jobs"]
        assert [one["name"] for one in listed] == ["third", "second", "tiny"]


@in_event_loop
async def test_a_restarted_controller_adopts_what_runs(store_settings: StoreSettings, tmp_path: Path) -> None:
    async with running(store_settings, tmp_path) as first:
        job = await started(first)
        async with running_successor(store_settings, tmp_path, first) as second:
            await asyncio.sleep(0.5)
            detail = await second.show(job)
            assert (detail["state"], detail["generation"], detail["restarts"]) == ("RUNNING", 1, 0)
            assert [e.kind for e in await second.events(job)] == ["submitted", "planned", "running"]
            dead = RankExit(rank=0, pid=1, signal=9, at=time.time(), step=1)
            await first.agents["a"].end_ranks(dead, all_gone=False)
            await second.reach(job, "RUNNING", 2)
            generations = (await second.api.get(f"/v1/jobs/{job}/generations")).json()["generations"]
            assert [g["generation"] for g in generations] == [1, 2]


def running_successor(settings: StoreSettings, tmp_path: Path, first: Running) -> Any:
    """A second controller that can lead only because the first one's lease ends now."""
    lease = first.controller.leadership._lease
    assert lease is not None
    first.controller.leadership._strive = asyncio.Event().wait  # type: ignore[method-assign,assignment]
    asyncio.get_running_loop().create_task(lease.close())
    return running(settings, tmp_path)
