"""Run functions as ranks: processes forked from this one, which has torch imported and never runs a backward.

A backward in the forking process leaves autograd threads behind that its children do not have, and their own backward
then hangs; so references run in a forked child as well: ``run_ranks(1, fn)``.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.optim
from torch._C._distributed_c10d import PrefixStore, Store

from engine.groups import Groups, build_groups
from engine.planning.layout import Layout
from tests.meeting import meeting_store

_FORK = multiprocessing.get_context("fork")


def _child(pipe: Connection, rank: int, fn: Callable[..., Any], prefix: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    code = 0
    try:
        from torch.distributed import TCPStore

        host, port = os.environ["EVERSTEP_TEST_STORE"].rsplit(":", 1)
        client = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        pipe.send((True, fn(rank, PrefixStore(prefix, client), *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        code = 1
    pipe.close()
    os._exit(code)


_runs = 0


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call ``fn(rank, store, *args)`` in ``world`` forked processes; return what each returned, in rank order.

    The store's prefix is new for each call. Raises AssertionError with the tracebacks when a rank raised, died or did
    not end within ``timeout_s``; whatever still runs is killed.
    """
    global _runs
    _runs += 1
    meeting_store()
    prefix = f"run-{os.getpid()}-{_runs}"
    processes, pipes = [], []
    for rank in range(world):
        ours, theirs = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_child, args=(theirs, rank, fn, prefix, args))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    try:
        open_pipes = dict(zip(pipes, range(world), strict=True))
        while open_pipes:
            ready = wait(list(open_pipes), timeout=timeout_s)
            if not ready:
                missing = sorted(open_pipes.values())
                raise AssertionError(f"ranks {missing} did not end within {timeout_s} s; errors so far: {errors}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = open_pipes.pop(pipe)
                try:
                    good, value = pipe.recv()
                except EOFError:
                    good, value = False, "ended without a result"
                (results if good else errors)[rank] = value
    finally:
        for process in processes:
            process.join(timeout=1.0 if not errors else 0.2)
            if process.is_alive():
                process.kill()
                process.join()
    assert not errors, "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(errors.items()))
    return [results[rank] for rank in range(world)]


def groups_of(
    layout: Layout, rank: int, store: Store, timeout_s: float = 60.0, device: torch.device | None = None
) -> Groups:
    """The groups of ``layout`` (on gloo over loopback unless ``device`` is a GPU), for use inside ``run_ranks``."""
    device = device or torch.device("cpu")
    return build_groups(layout, rank, store, device, bind_address="127.0.0.1", timeout_s=timeout_s)
