"""Secrets in files: a token, a password. One that others may read is no secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_secret(path: Path, what: str) -> str:
    """The text in ``path`` without the space around it; ``what`` names it in errors ("token file").

    Raises ValueError when the file cannot be read, is open to others, or is empty.
    """
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read().strip()
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {path}: not text") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(f"{what} {path}: others may read it; set its mode to 0600")
    if not text:
        raise ValueError(f"{what} {path}: it is empty")
    return text
