"""What happened to a job."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from controller.api.access import Served, job_of
from controller.api.models import EventList

router = APIRouter(prefix="/jobs", tags=["events"])


@router.get("/{job_id}/events")
async def list_events(job_id: str, controller: Served, after: Annotated[float, Query(ge=0)] = 0.0) -> EventList:
    """Events of a job, oldest first; those later than ``after`` (seconds since the epoch) when it is given."""
    job = job_of(controller, job_id)
    events = [job.events[key] for key in sorted(job.events)]
    return EventList(events=[event for event in events if event.at > after], stale=controller.stale)
