"""Files that appear under their final name complete or not at all: written aside, fsynced, renamed."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


class AsideFile:
    """A new file next to ``target`` under a name of its own, until ``publish`` or ``discard``.

    Raises FileNotFoundError when the directory does not exist.
    """

    def __init__(self, target: Path) -> None:
        if not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(target.parent))
        self.target = target
        self._path = target.with_name(f".{target.name}.{secrets.token_hex(6)}.aside")
        self.stream: BinaryIO = self._path.open("xb")

    def seal(self) -> None:
        """Bring every byte to the disk and close the file."""
        if not self.stream.closed:
            self.stream.flush()
            os.fsync(self.stream.fileno())
            self.stream.close()

    def publish(self) -> None:
        """Give the file its final name, replacing what was there."""
        self.seal()
        self._path.replace(self.target)

    def discard(self) -> None:
        """Remove the file unless it was published."""
        self.stream.close()
        self._path.unlink(missing_ok=True)


def fsync_directory(directory: Path) -> None:
    """Make renames and removals in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def written_aside(target: Path) -> Iterator[BinaryIO]:
    """A binary stream whose content becomes ``target`` when the block ends well; otherwise nothing is left."""
    file = AsideFile(target)
    try:
        yield file.stream
        file.publish()
        fsync_directory(target.parent)
    finally:
        file.discard()
