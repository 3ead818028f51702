"""Typed client of the REST API: what the command line uses, and what a script may use as well.

Every method makes one request. Raises ApiError when the service answers with a problem, ServiceUnreachable when it
does not answer at all. Answers may hold more than is named here; unknown fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import Field, ValidationError

from engine.planning.layout import Layout
from engine.planning.messages import Message, RestorePoint
from everstep.protocol.messages import (
    CheckpointRecord,
    Device,
    Event,
    JobSpec,
    JobState,
    Placement,
    RankStatus,
)

DEFAULT_URL = "http://127.0.0.1:8500"
"""Where ``everstep up`` listens unless told otherwise."""

M = TypeVar("M", bound=Message)


class FieldError(Message):
    """What is wrong with one field of a request."""

    field: str
    message: str


class Problem(Message):
    """An error as the service reports it (RFC 9457, ``application/problem+json``)."""

    title: str = "error"
    status: int = 0
    detail: str = ""
    errors: tuple[FieldError, ...] = ()


class ApiError(Exception):
    """The service refused a request; ``problem`` says why, field by field where fields are at fault."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(f"{problem.status} {problem.title}: {problem.detail}".rstrip(": "))

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.problem.status

    @property
    def errors(self) -> tuple[FieldError, ...]:
        """The fields at fault."""
        return self.problem.errors


class ServiceUnreachable(Exception):
    """Nobody answered at the service's address, or somebody who is no such service."""

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        super().__init__(f"no service at {url}: {reason}")


class JobSummary(Message):
    """One job in a line. ``mfu`` is the mean of its ranks, ``tokens_per_s`` of the whole job."""

    id: str
    name: str
    state: JobState
    reason: str = ""
    generation: int
    restarts: int = 0
    submitted_at: float
    started_at: float | None = None
    ended_at: float | None = None
    cancel_requested: bool = False
    layout: Layout | None = None
    num_ranks: int = 0
    step: int = Field(description="completed steps, as far as heartbeats told")
    train_steps: int
    consumed_samples: int = 0
    loss: float | None = None
    mfu: float | None = None
    tokens_per_s: float | None = None


class Generation(Message):
    """One generation of a job. ``start_step`` steps were complete when it began."""

    generation: int
    layout: Layout
    start_step: int
    restore: RestorePoint | None = None
    placements: tuple[Placement, ...] = ()
    created_at: float
    reason: str = ""
    stop: str = ""


class JobDetail(JobSummary):
    """Everything about one job but its events."""

    spec: JobSpec
    plan: Generation | None = None
    ranks: tuple[RankStatus, ...] = ()
    checkpoint: CheckpointRecord | None = None
    run_directory: str
    incident: dict[str, Any] | None = None
    stale: bool = False


class NodeView(Message):
    """One node. ``state``: ready, starting, refusing or gone; ``beat_age_s``: since its newest heartbeat was heard."""

    node: str
    state: str
    host: str = ""
    port: int = 0
    pid: int = 0
    devices: tuple[Device, ...] = ()
    started_at: float = 0.0
    beat_age_s: float | None = None
    jobs: tuple[str, ...] = ()
    ranks: tuple[RankStatus, ...] = ()


class _JobList(Message):
    jobs: tuple[JobSummary, ...]


class _EventList(Message):
    events: tuple[Event, ...]


class _GenerationList(Message):
    generations: tuple[Generation, ...]


class _NodeList(Message):
    nodes: tuple[NodeView, ...]


class Client:
    """One service. Use as a context manager, or call ``close``. ``token`` is the bearer token, where one is needed."""

    def __init__(self, url: str = DEFAULT_URL, *, token: str | None = None, timeout_s: float = 15.0) -> None:
        """Raises ValueError when ``url`` is no http(s) address."""
        address = httpx.URL(url)
        if address.scheme not in ("http", "https") or not address.host:
            raise ValueError(f"url: {url!r} is not an http:// or https:// address")
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Proxies of the environment are for the outside; they also cost every loopback call.
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s, headers=headers, trust_env=False)

    def submit(self, spec: Mapping[str, Any]) -> JobDetail:
        """Submit a job. Raises ApiError with status 422 and the fields at fault when the spec cannot be run."""
        return self._answer(JobDetail, "POST", "/v1/jobs", dict(spec))

    def jobs(self) -> tuple[JobSummary, ...]:
        """All jobs, newest first."""
        return self._answer(_JobList, "GET", "/v1/jobs").jobs

    def job(self, job: str) -> JobDetail:
        """One job. Raises ApiError with status 404 when there is none of that id."""
        return self._answer(JobDetail, "GET", _path(job))

    def events(self, job: str, *, after: float = 0.0) -> tuple[Event, ...]:
        """What happened to a job later than ``after`` (seconds since the epoch), oldest first."""
        return self._answer(_EventList, "GET", f"{_path(job)}/events?after={after!r}").events

    def generations(self, job: str) -> tuple[Generation, ...]:
        """All generations of a job, oldest first."""
        return self._answer(_GenerationList, "GET", f"{_path(job)}/generations").generations

    def cancel(self, job: str) -> JobDetail:
        """Ask for the end of a job. Raises ApiError with status 409 when it has ended."""
        return self._answer(JobDetail, "POST", f"{_path(job)}/cancel")

    def nodes(self) -> tuple[NodeView, ...]:
        """Registered nodes and those that left lately, by name."""
        return self._answer(_NodeList, "GET", "/v1/nodes").nodes

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, model: type[M], method: str, path: str, body: Mapping[str, Any] | None = None) -> M:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TimeoutException:
            raise ServiceUnreachable(self.url, "no answer in time") from None
        except httpx.TransportError as error:
            raise ServiceUnreachable(self.url, str(error)) from None
        if response.is_error:
            raise ApiError(_problem_of(response))
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ServiceUnreachable(self.url, f"its answer is not understood ({where}: {first['msg']})") from None


def _path(job: str) -> str:
    return f"/v1/jobs/{quote(job, safe='')}"


def _problem_of(response: httpx.Response) -> Problem:
    """The problem in an error answer; the bare status when somebody else (a proxy) answered."""
    try:
        return Problem.model_validate(json.loads(response.content))
    except (ValueError, ValidationError):
        return Problem(title=response.reason_phrase or "error", status=response.status_code)
