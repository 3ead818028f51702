"""Directories that appear under their final name complete or not at all: written aside, fsynced, renamed.

A process that is killed leaves at most a directory ``.NAME.XXXX.aside`` beside the target, which can be deleted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.checkpoint.shard import sync_directory

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def fresh_directory(
    target: Path, *, overwrite: Callable[[Path], bool] | None = None, kind: str = "directory"
) -> Iterator[Path]:
    """A new directory to write into, which becomes ``target`` when the block ends well; otherwise nothing is left.

    Who writes a file into it syncs that file. Parents of ``target`` are made. When ``target`` exists it is refused with
    FileExistsError, unless ``overwrite`` is given and says of it that it is a ``kind`` or empty: then it is replaced in
    one step at the end, and whoever looks sees the old or the new one. Raises OSError (EINVAL) when the file system
    cannot do that step.
    """
    target = target.absolute()
    _check(target, overwrite, kind)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(6)}.aside")
    aside.mkdir()
    try:
        yield aside
        sync_directory(aside)
        if os.path.lexists(target):
            _check(target, overwrite, kind)
            _exchange(aside, target)
        else:
            aside.rename(target)
        sync_directory(target.parent)
    finally:
        # What was not published, or the directory that was replaced.
        if aside.exists():
            shutil.rmtree(aside)


def _check(target: Path, overwrite: Callable[[Path], bool] | None, kind: str) -> None:
    if not os.path.lexists(target):
        return
    if overwrite is None:
        raise FileExistsError(errno.EEXIST, "is there already; --overwrite replaces it", str(target))
    if target.is_symlink() or not target.is_dir() or (any(target.iterdir()) and not overwrite(target)):
        raise FileExistsError(errno.EEXIST, f"is no {kind}, so it is not overwritten", str(target))


def _exchange(one: Path, other: Path) -> None:
    """Swap the names of two directories at once (Linux, ``renameat2(2)``)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"could not be replaced in one step: {os.strerror(number)}", str(other))
