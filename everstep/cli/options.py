"""Options that several commands share, and the client that they make."""

from __future__ import annotations

import os
from typing import Annotated

import httpx
import typer

from everstep.cli.output import BadInput
from everstep.client import DEFAULT_URL, Client

UrlOption = Annotated[str, typer.Option("--url", envvar="EVERSTEP_URL", help="Address of the service.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON object as the last line of stdout; text for people goes to stderr.")
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job, as `everstep list` shows it.")]

__all__ = ["DEFAULT_URL", "JobArgument", "JsonOption", "UrlOption", "client_of"]


def client_of(url: str) -> Client:
    """The client for ``--url``; a bearer token comes from EVERSTEP_TOKEN, so that it stays out of process lists."""
    try:
        return Client(url, token=os.environ.get("EVERSTEP_TOKEN"))
    except (ValueError, httpx.InvalidURL) as error:
        raise BadInput(f"--url {url}: {error}") from None
