"""What the routes share: the controller behind the request, jobs by id, and writes that fail quickly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, Request

from controller.leader import NotLeader
from controller.problem import ProblemError
from controller.service import Controller
from controller.view import Job
from everstep.protocol.store import Put, StoreUnavailable, Unchanged

LEADER_WAIT_S = 3.0
ECHO_WAIT_S = 2.0


def controller_of(request: Request) -> Controller:
    """The controller that this app serves."""
    controller: Controller = request.app.state.controller
    return controller


Served = Annotated[Controller, Depends(controller_of)]


def job_of(controller: Controller, job_id: str) -> Job:
    """The job; raises ProblemError 404, or 503 when nothing was heard from etcd yet."""
    if controller.board.view.synced_at is None:
        raise ProblemError(503, "etcd has not been reached yet", headers={"Retry-After": "1"})
    job = controller.board.view.jobs.get(job_id)
    if job is None or job.spec is None or job.status is None:
        raise ProblemError(404, f"there is no job {job_id}")
    return job


async def write(controller: Controller, conditions: Sequence[Unchanged], puts: Sequence[Put]) -> int | None:
    """As ``Leadership.transaction``; raises ProblemError 503 when etcd is away or another controller leads.

    A controller that has just started may still wait for its predecessor's lease: it is given a moment.
    """
    away = ProblemError(503, "etcd is away: nothing can be changed now", headers={"Retry-After": "2"})
    if controller.stale:
        raise away
    if not await controller.leadership.held_within(LEADER_WAIT_S):
        raise ProblemError(503, "this controller does not lead", headers={"Retry-After": "2"})
    try:
        revision = await controller.leadership.transaction(conditions, puts)
    except NotLeader as error:
        raise ProblemError(503, str(error), headers={"Retry-After": "2"}) from error
    except StoreUnavailable as error:
        unknown = "etcd did not answer in time: it may have been written all the same; look before trying again"
        raise ProblemError(503, unknown, headers={"Retry-After": "2"}) from error
    if revision is not None:
        await controller.board.reached(revision, ECHO_WAIT_S)
    return revision
