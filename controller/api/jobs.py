"""Jobs: submit, list, show, follow their generations and losses, cancel."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from controller.api.access import Served, job_of, write
from controller.api.models import GenerationList, JobDetail, JobList, LossTrail
from controller.history import surviving_lines
from controller.problem import ProblemError
from controller.submission import check_spec, new_job_id, parse_spec, read_body
from controller.summary import generation_of, job_detail, job_summary, run_directory
from everstep.protocol.messages import Event, JobSpec, JobState, JobStatus
from everstep.protocol.store import Put, Unchanged

router = APIRouter(prefix="/jobs", tags=["jobs"])

_SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            kind: {"schema": JobSpec.model_json_schema(ref_template="#/components/schemas/{model}")}
            for kind in ("application/json", "application/yaml")
        },
    }
}
for _content in _SPEC_BODY["requestBody"]["content"].values():
    _content["schema"].pop("$defs", None)

CANCEL_TRIES = 5
SETTLE_WAIT_S = 1.0


@router.post("", status_code=201, openapi_extra=_SPEC_BODY)
async def submit(request: Request, response: Response, controller: Served) -> JobDetail:
    """Submit a job: its spec as JSON or YAML. Answers 201 with the job, 422 with the fields at fault."""
    body = await read_body(request)
    spec = await asyncio.to_thread(parse_spec, body, request.headers.get("content-type", ""))
    spec = await asyncio.to_thread(check_spec, spec, controller.settings.data_root)
    job, now, keys = new_job_id(spec.name), time.time(), controller.keys
    status = JobStatus(job=job, name=spec.name, state=JobState.QUEUED, submitted_at=now, changed_at=now)
    event = Event(at=now, kind="submitted", job=job, message=f"submitted as {job}")
    puts = [
        Put(keys.spec(job), spec.model_dump_json().encode()),
        Put(keys.status(job), status.model_dump_json().encode()),
        Put(keys.event(job, now, 0), event.model_dump_json().encode()),
    ]
    if await write(controller, [Unchanged(keys.spec(job), 0)], puts) is None:
        raise ProblemError(503, "leadership was lost while submitting", headers={"Retry-After": "2"})
    response.headers["Location"] = f"/v1/jobs/{job}"
    return job_detail(controller.board.view, job_of(controller, job), stale=controller.stale)


@router.get("")
async def list_jobs(controller: Served, state: Annotated[list[JobState] | None, Query()] = None) -> JobList:
    """Jobs, newest first, of the given states or all."""
    view = controller.board.view
    jobs = [
        job_summary(view, job)
        for job in view.jobs.values()
        if job.spec is not None and job.status is not None and (not state or job.status.state in state)
    ]
    return JobList(jobs=sorted(jobs, key=lambda job: (-job.submitted_at, job.id)), stale=controller.stale)


@router.get("/{job_id}")
async def show(job_id: str, controller: Served) -> JobDetail:
    """Everything about one job but its events."""
    return job_detail(controller.board.view, job_of(controller, job_id), stale=controller.stale)


@router.get("/{job_id}/generations")
async def generations(job_id: str, controller: Served) -> GenerationList:
    """All generations of a job, oldest first."""
    job = job_of(controller, job_id)
    plans = [generation_of(job.plans[number]) for number in sorted(job.plans)]
    return GenerationList(generations=plans, stale=controller.stale)


@router.get("/{job_id}/metrics")
async def metrics(job_id: str, controller: Served, after: Annotated[int, Query(ge=0)] = 0) -> LossTrail:
    """What each step of the surviving history logged, from step ``after`` + 1 on."""
    job = job_of(controller, job_id)
    history = job.plan.history if job.plan else ()
    return LossTrail(steps=await asyncio.to_thread(surviving_lines, run_directory(job), history, after))


@router.post("/{job_id}/cancel", status_code=202)
async def cancel(job_id: str, controller: Served) -> JobDetail:
    """Ask for the end of a job; its ranks are killed. Asking twice does no harm; an ended job answers 409."""
    for _ in range(CANCEL_TRIES):
        job = job_of(controller, job_id)
        assert job.status is not None
        if job.status.state.final:
            raise ProblemError(409, f"job {job_id} has already ended: {job.status.state}")
        if job.status.cancel_requested or await _request_cancel(controller, job.status, job.status_revision):
            await _see_cancelled(controller, job_id)
            return job_detail(controller.board.view, job_of(controller, job_id), stale=controller.stale)
    raise ProblemError(409, f"job {job_id} keeps changing; try again")


async def _request_cancel(controller: Served, status: JobStatus, revision: int) -> bool:
    now, keys = time.time(), controller.keys
    wanted = status.model_copy(update={"cancel_requested": True})
    told = Event(
        at=now, kind="cancel_requested", job=status.job, generation=status.generation, message="cancel requested"
    )
    puts = [
        Put(keys.status(status.job), wanted.model_dump_json().encode()),
        Put(keys.event(status.job, now, 0), told.model_dump_json().encode()),
    ]
    written = await write(controller, [Unchanged(keys.status(status.job), revision)], puts)
    if written is None:
        await controller.board.changed(0.2)
    return written is not None


async def _see_cancelled(controller: Served, job_id: str) -> None:
    """Give the loop a moment: a job without ranks ends at once, and the answer should say so."""
    until = time.monotonic() + SETTLE_WAIT_S
    while time.monotonic() < until:
        job = job_of(controller, job_id)
        if not job.active or job.plan is not None:
            return
        await controller.board.changed(until - time.monotonic())
