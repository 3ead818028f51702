"""The FastAPI application: /v1, health, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

from controller.api import events, jobs, nodes
from controller.api.access import Served
from controller.auth import BearerAuth
from controller.problem import FieldError, Problem, ProblemError, invalid, on_problem, response
from controller.service import Controller
from everstep.protocol.messages import JobSpec

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in ((404, "No such job"), (409, "Not in this state"), (422, "Fields at fault"), (503, "Not now"))
}


def create_app(controller: Controller) -> FastAPI:
    """The app that serves ``controller``; whoever makes it keeps ``controller.run()`` going."""
    app = FastAPI(title="Everstep", version="1", summary="Fault-tolerant elastic training", docs_url="/docs")
    app.state.controller = controller
    auth = [Depends(BearerAuth(controller.settings.api_token))]
    for router in (jobs.router, events.router, nodes.router):
        app.include_router(router, prefix="/v1", dependencies=auth, responses=PROBLEMS)
    app.add_exception_handler(ProblemError, on_problem)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_error)

    @app.get("/healthz", tags=["service"])
    async def healthz() -> dict[str, str]:
        """The process lives and answers; etcd is not asked."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["service"], responses={503: {"model": Problem}})
    async def readyz(served: Served) -> dict[str, bool]:
        """Etcd is reached and the view is current."""
        if served.stale:
            raise ProblemError(503, "etcd is away")
        return {"ready": True, "leader": served.leadership.held}

    @app.get("/metrics", tags=["service"], response_class=Response)
    async def scrape(served: Served) -> Response:
        """Prometheus' text format."""
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [
        FieldError(field=".".join(str(part) for part in one["loc"][1:]), message=one["msg"]) for one in error.errors()
    ]
    return response(invalid(errors))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return response(ProblemError(error.status_code, str(error.detail), headers=dict(error.headers or {})))


async def _on_error(request: Request, error: Exception) -> Response:
    """Anything else is an error of ours; the server logs its traceback besides."""
    return response(ProblemError(500, "an error of the controller; its log has the traceback"))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, with the parts of the job spec, whose body we parse ourselves."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        parts = JobSpec.model_json_schema(ref_template="#/components/schemas/{model}").get("$defs", {})
        for name, part in parts.items():
            schema["components"]["schemas"].setdefault(name, part)
        app.openapi_schema = schema
    return app.openapi_schema
