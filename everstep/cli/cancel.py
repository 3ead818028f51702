"""``everstep cancel``."""

from __future__ import annotations

from rich.markup import escape

from everstep.cli.options import DEFAULT_URL, JobArgument, JsonOption, UrlOption, client_of
from everstep.cli.output import answering


def cancel(job: JobArgument, url: UrlOption = DEFAULT_URL, json_output: JsonOption = False) -> None:
    """Cancel a job: its ranks are ended. Returns when the request is recorded."""
    with answering(json_output) as out, client_of(url) as client:
        detail = client.cancel(job)
        out.say(f"{escape(detail.id)}: {'cancel requested' if not detail.state.final else detail.state.value}")
        out.result({"id": detail.id, "state": detail.state.value, "cancel_requested": detail.cancel_requested})
