"""How commands answer: text for people, one JSON object as the last line of stdout with ``--json``, and exit codes.

With ``--json`` everything for people goes to stderr, so stdout can be piped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from everstep.client import ApiError, ServiceUnreachable


class ExitCode(IntEnum):
    """What a script can rely on."""

    OK = 0
    FAILED = 1  # the job or the operation failed
    BAD_INPUT = 2  # wrong usage, or the service refused the input
    UNREACHABLE = 3  # no service at the address, or it has lost its store
    INTERRUPTED = 130  # ended by Ctrl-C


class BadInput(Exception):
    """The user gave something that cannot be right; the text says what."""


class OperationFailed(Exception):
    """Something that was asked for in the right way did not work out; the text says why."""


class Output:
    """Where one command's answer goes."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=as_json, highlight=False)

    def say(self, text: str) -> None:
        """One line for people; rich markup is understood."""
        self.console.print(text, soft_wrap=True)

    def result(self, answer: Mapping[str, Any]) -> None:
        """The command's answer for programs: printed only with ``--json``, as one line."""
        if self.as_json:
            sys.stdout.write(json.dumps(answer, separators=(",", ":"), allow_nan=False) + "\n")
            sys.stdout.flush()

    def error(self, code: ExitCode, message: str, fields: tuple[tuple[str, str], ...] = ()) -> None:
        """Say what is wrong, field by field where fields are at fault."""
        console = Console(stderr=True, highlight=False)
        console.print(f"[bold red]error:[/] {escape(message)}")
        for field, reason in fields:
            console.print(f"  [bold]{escape(field or '(whole spec)')}[/]: {escape(reason)}")
        errors = [{"field": field, "message": reason} for field, reason in fields]
        self.result({"error": message, "errors": errors, "exit_code": int(code)})


def code_of(error: ApiError) -> ExitCode:
    """The exit code that an answer of the service means.

    What the user sent was wrong (400, 404, 413, 415, 422): 2; the service has lost its store (503): 3; else: 1.
    """
    if error.status in (400, 404, 405, 413, 415, 422):
        return ExitCode.BAD_INPUT
    return ExitCode.UNREACHABLE if error.status == 503 else ExitCode.FAILED


@contextmanager
def answering(as_json: bool) -> Iterator[Output]:
    """Run a command's body; an error that people can cause becomes a message and an exit code, never a traceback."""
    output = Output(as_json)
    try:
        yield output
    except ApiError as error:
        code = code_of(error)
        problem = error.problem
        message = f"{problem.title}: {problem.detail}" if problem.detail else problem.title
        output.error(code, message, tuple((item.field, item.message) for item in problem.errors))
    except ServiceUnreachable as error:
        code = ExitCode.UNREACHABLE
        output.error(code, f"{error}; start one with `everstep up`, or name it with --url or EVERSTEP_URL")
    except BadInput as error:
        code = ExitCode.BAD_INPUT
        output.error(code, str(error))
    except OperationFailed as error:
        code = ExitCode.FAILED
        output.error(code, str(error))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        code = ExitCode.BAD_INPUT
        output.error(code, f"{error.strerror}: {error.filename}")
    except BrokenPipeError:
        raise
    except OSError as error:
        code = ExitCode.FAILED
        output.error(code, f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
        output.error(code, "interrupted")
    else:
        return
    raise typer.Exit(code)
