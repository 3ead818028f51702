"""The real engine under an agent: two ranks train, one is killed, a second generation goes on and completes."""

from __future__ import annotations

from pathlib import Path

from engine.planning.layout import Layout
from engine.planning.messages import GenerationStart, RestorePoint
from everstep.protocol.etcd_server import PrivateEtcd
from everstep.protocol.messages import CheckpointRecord
from everstep.protocol.store import Store
from tests.training import metrics, tiny_run
from tests.worker.cluster import KEYS, AgentProcess, eventually, kill, outcome, put_plan, stepping, with_store


def test_train_kill_restore_complete(other_agent: AgentProcess, etcd: PrivateEtcd, corpus: str, tmp_path: Path) -> None:
    config = tiny_run(corpus, tmp_path / "run", train_steps=40)
    checkpoint = config.checkpoint.model_copy(update={"save_interval": 5})
    config = config.model_copy(update={"checkpoint": checkpoint})
    directory = str(tmp_path / "run")
    other_agent.start("--entry", "engine.rank:main")
    other_agent.wait_ready()

    async def test(store: Store) -> None:
        first = GenerationStart(generation=1, start_step=0)
        await put_plan(
            store, "other", "train", "", 1, layout=Layout(tp=2), run=config, run_directory=directory, history=(first,)
        )
        ranks = await stepping(store, "other", "train")
        item = await eventually(lambda: store.get(KEYS.checkpoint("train", 5, 1)))
        record = CheckpointRecord.model_validate_json(item.value)
        kill(next(rank.pid for rank in ranks if rank.rank == 1))
        found = await outcome(store, "other", "train", 1, lambda found: bool(found.exits))
        fault = next(end for end in found.exits if end.rank == 1)
        assert (fault.signal, fault.is_fault) == (9, True)

        restore = RestorePoint(step=5, generation=1, directory=record.directory)
        history = (first, GenerationStart(generation=2, start_step=5))
        more = {"run": config, "run_directory": directory, "restore": restore, "history": history}
        await put_plan(store, "other", "train", "", 2, layout=Layout(dp=2), **more)
        ended = await outcome(store, "other", "train", 2, lambda found: found.all_gone, timeout_s=60)
        assert ended.run_complete, ended
        assert [end.complete for end in ended.exits] == [True, True]
        assert [end.step for end in ended.exits] == [40, 40]
        await store.delete(KEYS.plan("train"))

    with_store(etcd.endpoint, test)
    assert [line["step"] for line in metrics(config, 2)] == list(range(6, 41))
