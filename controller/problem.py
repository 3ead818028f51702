"""Errors as problem+json (RFC 9457), with the fields at fault."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

MEDIA_TYPE = "application/problem+json"


class FieldError(BaseModel):
    """What is wrong with one field, named by its path: ``model.hidden_size``."""

    field: str
    message: str
    value: Any = None


class Problem(BaseModel):
    """Body of every error answer."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[FieldError] = []


@dataclass
class ProblemError(Exception):
    """Raise it anywhere in a request: the answer is the problem."""

    status: int
    detail: str
    errors: list[FieldError] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)


def response(error: ProblemError) -> JSONResponse:
    """The answer for ``error``."""
    body = Problem(title=HTTPStatus(error.status).phrase, status=error.status, detail=error.detail, errors=error.errors)
    exclude = {"errors"} if not error.errors else None
    content = body.model_dump(mode="json", exclude=exclude, exclude_none=True)
    return JSONResponse(content, error.status, headers=error.headers, media_type=MEDIA_TYPE)


async def on_problem(request: Request, error: Exception) -> JSONResponse:
    """Exception handler of the app."""
    assert isinstance(error, ProblemError)
    return response(error)


def invalid(errors: list[FieldError]) -> ProblemError:
    """422 for a request whose fields are at fault."""
    return ProblemError(422, "; ".join(f"{e.field}: {e.message}" if e.field else e.message for e in errors), errors)


_LEADING_PATH = re.compile(r"^([a-z_]+(?:\.[a-z_]+)*)[ :]")


def field_errors(error: ValidationError, model: type[BaseModel]) -> list[FieldError]:
    """Pydantic's errors as ours. A rule over several fields is put down to the field that its message begins with."""
    found = []
    for one in error.errors(include_url=False):
        cause = one.get("ctx", {}).get("error")
        if isinstance(cause, ValidationError):  # a validator that built another of our models
            found += field_errors(cause, model)
            continue
        message = one["msg"].removeprefix("Value error, ")
        # Pydantic names the branch of a union by its type: "literal['auto']", "function-after[_check(), Layout]".
        location = [str(part) for part in one["loc"] if "[" not in str(part)]
        path = ".".join(location)
        if one["type"] == "value_error" and (named := _LEADING_PATH.match(message)):
            path = _resolve(model, location, named[1].split(".")) or path
        value = one.get("input")
        plain = isinstance(value, str | int | float | bool)
        if one["type"] == "extra_forbidden":
            message = "unknown field"
        found.append(FieldError(field=path, message=message, value=value if plain else None))
    # Where one branch of a union came further, what it says is what the user wants to hear.
    furthest = [error for error in found if not any(other.field.startswith(f"{error.field}.") for other in found)]
    by_field: dict[str, FieldError] = {}
    for latest in furthest:
        known = by_field.get(latest.field)
        message = latest.message if known is None else f"{known.message}; {latest.message}"
        by_field[latest.field] = latest.model_copy(update={"message": message})
    return list(by_field.values())


def _resolve(model: type[BaseModel], location: Sequence[str], named: Sequence[str]) -> str | None:
    """The full path of ``named``, which a message at ``location`` began with: relative to it, or from the root."""
    for base in (list(location), []):
        if _exists(model, [*base, *named]):
            return ".".join([*base, *named])
    return None


def _exists(model: type[BaseModel], path: Sequence[str]) -> bool:
    current: Any = model
    for part in path:
        if not (isinstance(current, type) and issubclass(current, BaseModel)) or part not in current.model_fields:
            return False
        current = current.model_fields[part].annotation
    return True
