"""The REST interface: what is refused and why, what is served while etcd is away, who may call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.history import surviving_lines
from controller.problem import ProblemError
from controller.submission import check_spec, parse_spec
from engine.planning.messages import GenerationStart
from everstep.protocol.etcd_server import PrivateEtcd
from everstep.protocol.store import StoreSettings
from tests.controller.corpora import write_corpus
from tests.controller.running import running
from tests.controller.specs import spec_dict
from tests.coroutines import in_event_loop, until

REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("unknown field", {"model__num_layer": 3}, "model.num_layer", "unknown field"),
    ("unknown field at the top", {"colour": "red"}, "colour", "unknown field"),
    ("missing field", {"model__num_layers": None}, "model.num_layers", "required"),
    ("wrong type", {"train__global_batch_size": "many"}, "train.global_batch_size", "integer"),
    ("bad name", {"name": "No Spaces"}, "name", "pattern"),
    ("heads do not divide hidden", {"model__hidden_size": 190}, "model.hidden_size", "not divisible"),
    ("kv heads do not divide heads", {"model__num_key_value_heads": 3}, "model.num_attention_heads", "not divisible"),
    ("batch no multiple", {"train__micro_batch_size": 3}, "train.global_batch_size", "multiple of micro_batch_size 3"),
    ("sequence too long", {"train__sequence_length": 500}, "train.sequence_length", "max_sequence_length"),
    ("infinite number", {"train__lr": float("inf")}, "train.lr", "finite"),
    ("tp against kv heads", {"layout": {"tp": 4}}, "layout", "num_key_value_heads 2 is not divisible by layout.tp 4"),
    ("pp against layers", {"layout": {"pp": 7}}, "layout", "more than model.num_layers 6"),
    ("dp against batch", {"layout": {"dp": 9}}, "layout", "8 micro-batches"),
    ("layout field", {"layout": {"tq": 2}}, "layout.tq", "unknown field"),
    ("layout word", {"layout": "best"}, "layout", "auto"),
    ("layout above ranks", {"layout": {"dp": 4}, "resources__ranks": 2}, "layout", "needs 4 ranks, there are 2"),
    ("layout below min_ranks", {"layout": {"dp": 4}, "resources__min_ranks": 5}, "resources.min_ranks", "fewer than 5"),
    ("min above ranks", {"resources__ranks": 2, "resources__min_ranks": 3}, "resources.min_ranks", "above"),
    ("batch no layout can run", {"resources__min_ranks": 97}, "resources.min_ranks", "no layout can run this on 97"),
    ("no layout of that size", {"resources": {"ranks": 7, "min_ranks": 7}, "train__global_batch_size": 1},
     "resources.min_ranks", "no layout can run this on 7 or at most 7 ranks"),
    ("no corpus", {"data__path": "corpus/other"}, "data.path", "does not exist"),
    ("truncated corpus", {"data__path": "corpus/cut"}, "data.path", "truncated"),
    ("corpus too short", {"data__path": "corpus/short"}, "data.path", "one sample"),
    ("corpus outside", {"data__path": "../elsewhere"}, "data.path", "must lie below"),
    ("corpus by link outside", {"data__path": "link/tokens"}, "data.path", "must lie below"),
    ("NUL in a path", {"data__path": "a\0b"}, "data.path", "must lie below"),
    ("directory outside", {"checkpoint__directory": "/etc"}, "checkpoint.directory", "must lie below"),
]  # fmt: skip


@pytest.fixture
def data_root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    write_corpus(root / "corpus" / "tokens")
    write_corpus(root / "corpus" / "short", num_tokens=40)
    write_corpus(root / "corpus" / "cut")
    with (root / "corpus" / "cut.bin").open("r+b") as file:
        file.truncate(100)
    (root / "link").symlink_to(tmp_path)
    return root


@pytest.mark.parametrize(("changes", "field", "why"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_bad_specs_are_refused_with_the_field_and_the_reason(
    changes: dict[str, Any], field: str, why: str, data_root: Path
) -> None:
    with pytest.raises(ProblemError) as refused:
        check_spec(parse_spec(json.dumps(spec_dict(**changes)).encode(), "application/json"), data_root)
    assert refused.value.status == 422
    found = {error.field: error.message for error in refused.value.errors}
    assert field in found, found
    assert why in found[field], found


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{", "application/json", 422),
        (b"[1]", "application/json", 422),
        (b"a: [", "application/yaml", 422),
        (b"", "application/yaml", 422),
        (b"!!python/object/apply:os.system ['true']", "application/yaml", 422),
        (b"{}", "text/plain", 415),
        (b"{}", "", 415),
    ],
)
def test_bodies_that_are_no_spec(body: bytes, kind: str, status: int) -> None:
    with pytest.raises(ProblemError) as refused:
        parse_spec(body, kind)
    assert refused.value.status == status


def test_paths_become_absolute_below_the_data_root(data_root: Path) -> None:
    spec = check_spec(parse_spec(yaml.safe_dump(spec_dict()).encode(), "application/yaml"), data_root)
    assert (spec.data.path, spec.checkpoint.directory) == (f"{data_root}/corpus/tokens", f"{data_root}/runs")


@in_event_loop
async def test_problems_and_yaml_over_http(
    store_settings: StoreSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(store_settings, tmp_path) as service:
        answer = await service.api.post("/v1/jobs", json=spec_dict(model__hidden_size=190))
        assert answer.status_code == 422 and answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert problem["status"] == 422 and problem["errors"][0]["field"] == "model.hidden_size"
        service.api._transport.raise_app_exceptions = False  # type: ignore[attr-defined]
        monkeypatch.setattr("controller.api.jobs.job_summary", lambda view, job: 1 / 0)
        await service.submit()
        broken = await service.api.get("/v1/jobs")
        assert broken.status_code == 500 and broken.json()["title"] == "Internal Server Error"
        big = await service.api.post("/v1/jobs", content=b" " * (1 << 21), headers={"content-type": "application/json"})
        assert big.status_code == 413
        answer = await service.api.get("/v1/jobs/nope")
        assert answer.status_code == 404 and answer.json()["title"] == "Not Found"
        assert (await service.api.get("/v1/nothing")).headers["content-type"] == "application/problem+json"
        assert (await service.api.get("/v1/jobs?state=ODD")).status_code == 422
        yaml_text = yaml.safe_dump(spec_dict())
        answer = await service.api.post("/v1/jobs", content=yaml_text, headers={"content-type": "application/yaml"})
        assert answer.status_code == 201 and answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
        detail = answer.json()
        assert detail["state"] == "QUEUED" and not detail["stale"]
        await until(lambda: service.controller.board.view.jobs[detail["id"]].status.reason)  # type: ignore[union-attr]
        assert "waiting for devices" in (await service.show(detail["id"]))["reason"]


@in_event_loop
async def test_nodes_health_metrics_and_description(store_settings: StoreSettings, tmp_path: Path) -> None:
    async with running(store_settings, tmp_path) as service:
        await service.add_agents("a b")
        job = await service.submit()
        await service.reach(job, "RUNNING")
        nodes = (await service.api.get("/v1/nodes")).json()["nodes"]
        assert [(one["node"], one["state"], one["jobs"]) for one in nodes] == [
            ("a", "ready", [job]),
            ("b", "ready", [job]),
        ]
        assert (await service.api.get("/healthz")).json() == {"status": "ok"}
        assert (await service.api.get("/readyz")).json() == {"ready": True, "leader": True}
        text = (await service.api.get("/metrics")).text
        assert 'everstep_jobs{state="RUNNING"} 1.0' in text and "everstep_nodes 2.0" in text
        assert f'everstep_job_loss{{job="{job}"}} 2.5' in text
        await service.api.post(f"/v1/jobs/{job}/cancel")
        await service.reach(job, "CANCELLED")
        assert job not in (await service.api.get("/metrics")).text
        description = (await service.api.get("/openapi.json")).json()
        body = description["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/yaml"]["schema"]
        assert "model" in body["required"] and "ModelConfig" in description["components"]["schemas"]


@in_event_loop
async def test_a_bearer_token_guards_v1_when_there_is_one(store_settings: StoreSettings, tmp_path: Path) -> None:
    async with running(store_settings, tmp_path, api_token="secret") as service:
        assert (await service.api.get("/v1/jobs")).status_code == 401
        assert (await service.api.get("/v1/jobs", headers={"Authorization": "Bearer wrong"})).status_code == 401
        assert (await service.api.get("/v1/jobs", headers={"Authorization": "Bearer secret"})).status_code == 200
        assert (await service.api.get("/healthz")).status_code == 200


@in_event_loop
async def test_while_etcd_is_away_reads_are_marked_and_writes_refused(
    breakable_etcd: PrivateEtcd, tmp_path: Path
) -> None:
    settings = StoreSettings(endpoints=(breakable_etcd.endpoint,), root="/t", call_timeout_s=0.5)
    async with running(settings, tmp_path) as service:
        await service.add_agents("a b")
        job = await service.submit()
        await service.reach(job, "RUNNING", 1)
        await until(lambda: service.agents["b"].plan)
        breakable_etcd.process.kill()
        breakable_etcd.process.wait()
        await until(lambda: service.controller.stale)
        detail = await service.show(job)
        assert detail["stale"] and detail["state"] == "RUNNING"
        assert (await service.api.post("/v1/jobs", json=spec_dict())).status_code == 503
        assert (await service.api.post(f"/v1/jobs/{job}/cancel")).status_code == 503
        assert (await service.api.get("/healthz")).status_code == 200
        assert (await service.api.get("/readyz")).status_code == 503
        breakable_etcd.start()
        await until(lambda: not service.controller.stale and service.controller.leadership.held)
        await service.agents["b"].end_ranks(*service.agents["b"].exits(signal=9), all_gone=False)
        detail = await service.reach(job, "RUNNING", 2)
        assert detail["restarts"] == 1 and not detail["stale"]


def test_only_the_surviving_history_of_metrics_counts(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()

    def write(generation: int, steps: range) -> None:
        lines = "".join(json.dumps({"step": s, "loss": generation}) + "\n" for s in steps)
        (tmp_path / "metrics" / f"g{generation:04d}.jsonl").write_text(lines + '{"step": 9')

    write(1, range(1, 8))
    write(2, range(6, 9))
    starts = [GenerationStart(generation=1, start_step=0), GenerationStart(generation=2, start_step=5)]
    lines = surviving_lines(str(tmp_path), starts, after=3)
    assert [(line["step"], line["loss"]) for line in lines] == [(4, 1), (5, 1), (6, 2), (7, 2), (8, 2)]
