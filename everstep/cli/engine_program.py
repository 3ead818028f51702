"""Running one of the engine's programs as a child that cannot outlive us, and reading its lines as they come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from everstep.protocol import exec_tied
from everstep.protocol.processes import terminate

_GRACE_S = 5.0


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules; ``-P`` keeps folders of the same name in the working directory out."""
    return [sys.executable, "-P", "-m", module, *arguments]


def run_program(
    module: str, arguments: Sequence[str], on_line: Callable[[dict[str, Any]], None] = lambda line: None
) -> tuple[int, dict[str, Any] | None, str]:
    """Run ``python -m module arguments`` to its end.

    Each JSON object it prints goes to ``on_line``. Returns its exit code, its last JSON object and what it wrote to
    stderr. When we are interrupted it is ended (SIGTERM, then SIGKILL) before this returns.
    """
    command = [sys.executable, "-I", "-S", exec_tied.__file__, str(os.getpid()), *module_command(module, *arguments)]
    last: dict[str, Any] | None = None
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        try:
            assert process.stdout is not None
            for text in process.stdout:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue  # text for people
                if isinstance(line, dict):
                    last = line
                    on_line(line)
            code = process.wait()
        finally:
            terminate(process, _GRACE_S)
            if process.stdout is not None:
                process.stdout.close()
        errors.seek(0)
        return code, last, errors.read().decode(errors="replace").strip()
