"""Which checkpoints a job has on the shared disk. The index in etcd may be behind it: its writer can die in between."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Collection
from pathlib import Path

from controller.view import Job, OnDisk
from engine.planning.messages import RestorePoint

_log = logging.getLogger(__name__)

LOOK_S = 1.0

_NAME = re.compile(r"step-(\d+)\.g(\d+)")
_MANIFEST = "manifest.json"


def look(directory: Path, indexed: Collection[str]) -> OnDisk:
    """Complete checkpoints in ``directory``, and which of the ``indexed`` directories are not there any more.

    Raises OSError when the directory cannot be listed: then nothing is known to be there, and nothing to be gone.
    """
    found = []
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and (path / _MANIFEST).is_file():
            found.append(RestorePoint(step=int(match[1]), generation=int(match[2]), directory=str(path)))
    there = {point.directory for point in found}
    gone = {name for name in indexed if Path(name).parent == directory and name not in there}
    return OnDisk(tuple(sorted(found, key=lambda point: (point.step, point.generation))), frozenset(gone))


class DiskReader:
    """Looks at the disk aside of the event loop. A file system that hangs costs one thread a job, and no more time."""

    def __init__(self, timeout_s: float = LOOK_S) -> None:
        self._timeout_s = timeout_s
        self._pending: dict[str, asyncio.Future[OnDisk]] = {}

    async def look(self, job: Job) -> OnDisk:
        """What the disk says about ``job``; when it says nothing in time, ``OnDisk()``: the index alone counts."""
        if job.plan is None or job.id in self._pending:
            return OnDisk()
        directory = Path(job.plan.run_directory) / "checkpoints"
        indexed = [record.directory for record in job.checkpoints.values()]
        loop = asyncio.get_running_loop()
        answer = self._pending[job.id] = loop.create_future()

        def work() -> None:
            try:
                result: OnDisk | Exception = look(directory, indexed)
            except Exception as error:
                result = error
            # The loop is closed when the program has ended meanwhile.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._answered, job.id, result)

        # A daemon: it must not hold up the end of the program either.
        threading.Thread(target=work, name=f"look at {job.id}", daemon=True).start()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(answer)
        except FileNotFoundError:
            return OnDisk()  # nothing was ever saved, or the disk is not here
        except OSError as error:  # TimeoutError too
            _log.warning("job %s: its checkpoints cannot be listed, the index alone counts: %r", job.id, error)
            return OnDisk()

    def _answered(self, job: str, result: OnDisk | Exception) -> None:
        answer = self._pending.pop(job)
        if isinstance(result, OnDisk):
            answer.set_result(result)
        else:
            answer.set_exception(result)
            answer.exception()  # nobody may be waiting any more
