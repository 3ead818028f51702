"""Who may call the API: whoever shows the bearer token, when there is one."""

from __future__ import annotations

import hmac
from pathlib import Path

from fastapi import Request

from controller.problem import ProblemError
from everstep.protocol.secret_file import read_secret


def read_api_token(path: Path) -> str:
    """The token in ``path``; raises ValueError when it is missing, empty, or open to others."""
    return read_secret(path, "API token file")


class BearerAuth:
    """A dependency of every route below /v1. Without a token everybody may call."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    async def __call__(self, request: Request) -> None:
        """Raise 401 unless the request carries the token; the comparison takes the same time whatever differs."""
        if self._token is None:
            return
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), self._token.encode()):
            raise ProblemError(401, "a valid bearer token is needed", headers={"WWW-Authenticate": "Bearer"})
