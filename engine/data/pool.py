"""Worker processes that map items in order, with bounded memory, and whose death is an error at once.

``multiprocessing.Pool`` waits for ever when a worker is killed, and ``ProcessPoolExecutor`` can hang while it cleans up
after one. Here each worker has a pipe of its own and holds one item at a time, so nothing is shared that a dying worker
could leave locked; and a worker whose parent dies sees the end of its pipe and ends.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_LOOK_AHEAD = 4
"""Items a worker that may be done or under way beyond the one that is to be given out next."""


class WorkerError(RuntimeError):
    """A worker process died or raised."""


def _serve(pipe: Connection, start: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
    # Ctrl-C goes to the whole foreground group; the parent decides what it means and ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        work = start(*arguments)
        while True:
            number, item = pipe.recv()
            pipe.send((number, work(item), None))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is done with us, or gone
    except Exception:
        pipe.send((-1, None, traceback.format_exc()))


class OrderedPool(Generic[Item, Result]):
    """``num_workers`` processes that each call ``start(*arguments)`` once and then the function it returned per item.

    ``start`` must be importable (workers are spawned, so that no thread or lock of this process is copied). Use it as
    a context manager; leaving the block ends the workers whatever happened.
    """

    def __init__(self, num_workers: int, start: Callable[..., Callable[[Item], Result]], *arguments: object) -> None:
        assert num_workers >= 1
        context = multiprocessing.get_context("spawn")
        self._workers: dict[Connection, BaseProcess] = {}
        try:
            for _ in range(num_workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, start, arguments), daemon=True)
                process.start()
                theirs.close()
                self._workers[ours] = process
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [process.pid for process in self._workers.values() if process.pid is not None]

    def map(self, items: Iterable[Item]) -> Iterator[Result]:
        """The results of ``items`` in their order. Raises WorkerError within moments of a worker's death."""
        source = enumerate(items)
        window = _LOOK_AHEAD * len(self._workers)
        idle = list(self._workers)
        done: dict[int, Result] = {}
        given = taken = 0
        exhausted = False
        while not (exhausted and given == taken):
            while idle and not exhausted and taken - given < window:
                numbered = next(source, None)
                if numbered is None:
                    exhausted = True
                else:
                    self._send(idle.pop(), numbered)
                    taken += 1
            if given in done:
                yield done.pop(given)
                given += 1
            elif given < taken:
                # All workers are watched, idle ones too: the death of any is an error.
                for ready in wait(list(self._workers)):
                    assert isinstance(ready, Connection)
                    number, result = self._receive(ready)
                    done[number] = result
                    idle.append(ready)

    def _send(self, pipe: Connection, numbered: tuple[int, Item]) -> None:
        try:
            pipe.send(numbered)
        except OSError:
            self._receive(pipe)  # raises: a worker that takes nothing has failed or died
            raise

    def _receive(self, pipe: Connection) -> tuple[int, Result]:
        try:
            number, result, failure = pipe.recv()
        except (EOFError, OSError):
            process = self._workers[pipe]
            process.join(timeout=5.0)
            code = process.exitcode
            how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
            raise WorkerError(f"worker process {process.pid} died {how}") from None
        if failure is not None:
            raise WorkerError(f"a worker failed:\n{failure}")
        return number, result

    def close(self) -> None:
        """End the workers and wait until they are gone."""
        for pipe in self._workers:
            pipe.close()
        for process in self._workers.values():
            process.kill()  # a worker holds nothing that needs an orderly end
            process.join()
        self._workers.clear()

    def __enter__(self) -> OrderedPool[Item, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
