"""A save that failed reaches etcd as an event, while the ranks go on."""

from __future__ import annotations

from everstep.protocol.messages import Event
from everstep.protocol.store import Store
from tests.worker.cluster import KEYS, AgentProcess, end_job, eventually, put_plan, stepping, with_store


def test_a_failed_save_becomes_an_event_of_the_job(agent: AgentProcess) -> None:
    async def test(store: Store) -> None:
        await put_plan(store, "shared", "full", "full_disk")

        async def told() -> Event | None:
            items = (await store.list(KEYS.events("full"))).items
            return Event.model_validate_json(items[0].value) if items else None

        event = await eventually(told)
        assert (event.kind, event.job, event.generation) == ("save_failed", "full", 1)
        assert event.message == (
            "the save after step 4 failed, 2 in a row: /state/4/shard-00001.safetensors: No space left on device"
        )
        assert event.data["errno"] == 28
        assert len(await stepping(store, "shared", "full")) == 2
        await end_job(store, "shared", "full", 1)

    with_store(agent._endpoint, test)
