"""One thread that does one piece of work at a time, and hands what it raised back to whoever waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWorker:
    """A thread beside the caller's. Whatever a piece of work raises stays until ``wait`` or ``close`` raises it.

    The thread is a daemon: a process that ends because of a fault does not wait for a write or for a peer.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._work: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def error(self) -> BaseException | None:
        """What the last piece of work raised; None while it runs or when it ended well."""
        return self._error

    def start(self, work: Callable[[], None]) -> None:
        """Have ``work`` done. The one before has to be over: see ``wait``."""
        with self._changed:
            assert self._work is None and self._error is None and not self._closed
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._work = work
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when nothing is being done; raises what the last piece of work raised, also when asked again."""
        with self._changed:
            self._changed.wait_for(lambda: self._work is None)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """End the thread after what it does now; raises like ``wait``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.wait()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work is not None or self._closed)
                work = self._work
            if work is None:
                return
            error: BaseException | None = None
            try:
                work()
            except BaseException as raised:  # it is the waiting thread's to handle
                error = raised
            with self._changed:
                self._error, self._work = error, None
                self._changed.notify_all()
