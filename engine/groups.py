"""The process groups of one generation, built from a Layout and passed explicitly; there is no global group.

A ``Group`` wraps a ProcessGroup object of torch's (gloo on CPU, NCCL on CUDA) that was built straight from a store, so
only its members take part in building it and a new generation can be formed beside the old one. Groups of one rank do
no communication at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    Backend,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    ReduceScatterOptions,
    Store,
    Work,
)

from engine.planning.layout import Coordinates, Layout

SUM = ReduceOp.SUM
MAX = ReduceOp.MAX


class CollectiveError(RuntimeError):
    """A peer is gone or did not come in time. The fault is another rank's as a rule, seldom this one's."""


@contextmanager
def _peers_needed() -> Iterator[None]:
    """What torch raises while it talks to other ranks becomes a CollectiveError; out of memory stays what it is."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CollectiveError(str(error)) from error


class Pending:
    """A collective on its way. ``wait`` blocks until the result is usable (on CUDA: until the stream waits for it)."""

    def __init__(self, work: Work | None, then: Callable[[], object] | None = None) -> None:
        self._work = work
        self._then = then

    def wait(self) -> None:
        """Block until done; raises CollectiveError when a peer is gone."""
        if self._work is not None:
            with _peers_needed():
                self._work.wait()
            self._work = None
            if self._then is not None:
                self._then()


class Group:
    """Some ranks of the job that talk to each other; ``rank`` and ``size`` are places within the group.

    Every operation raises CollectiveError when a peer is known to be gone, be it at once or when it is waited for.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, backend: Backend | None) -> None:
        assert (backend is None) == (len(ranks) == 1)
        self.name = name
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self._backend: Any = backend  # torch's stubs leave the collectives of a Backend out
        self._is_gloo = isinstance(backend, ProcessGroupGloo)

    def all_reduce(self, tensor: Tensor, op: ReduceOp.RedOpType = SUM) -> Pending:
        """Reduce ``tensor`` in place over the group; every member ends with the same bits."""
        if self._backend is None:
            return Pending(None)
        options = AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        return self._start(lambda: self._backend.allreduce([tensor], options))

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Pending:
        """Sum ``source`` [size * n] over the group; member i gets the i-th n elements in ``output`` [n].

        ``output`` may be that very part of ``source``, which saves a copy. What the rest of ``source`` holds
        afterwards is undefined.
        """
        if self._backend is None:
            if output.data_ptr() != source.data_ptr():
                output.copy_(source)
            return Pending(None)
        if self._is_gloo:
            # Gloo's reduce_scatter takes 1.0 to 1.7 times as long as its all_reduce at 4 to 16 MB (2 to 4 ranks on two
            # cores, torch 2.13; about even at 1 MB), so everybody gets the whole sum and keeps its part.
            part = source.narrow(0, self.rank * output.numel(), output.numel())
            in_place = part.data_ptr() == output.data_ptr()
            return self._start(
                lambda: self._backend.allreduce([source]), None if in_place else lambda: output.copy_(part)
            )
        return self._start(lambda: self._backend._reduce_scatter_base(output, source, ReduceScatterOptions()))

    def all_gather(self, output: Tensor, source: Tensor) -> Pending:
        """Concatenate every member's ``source`` [n] into ``output`` [size * n]."""
        if self._backend is None:
            if output.data_ptr() != source.data_ptr():
                output.copy_(source)
            return Pending(None)
        return self._start(lambda: self._backend._allgather_base(output, source))

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Pending:
        """Start sending ``tensor`` to group member ``to``; keep the tensor unchanged until ``wait`` returned."""
        assert self._backend is not None, "a group of one has nobody to send to"
        return self._start(lambda: self._backend.send([tensor], to, tag))

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Pending:
        """Start receiving into ``tensor`` from group member ``source``."""
        assert self._backend is not None, "a group of one has nobody to receive from"
        return self._start(lambda: self._backend.recv([tensor], source, tag))

    def barrier(self) -> None:
        """Wait until every member is here."""
        if self._backend is not None:
            self._start(lambda: self._backend.barrier()).wait()

    def _start(self, call: Callable[[], Work], then: Callable[[], object] | None = None) -> Pending:
        """A broken connection shows at the start of some operations, in the wait of others."""
        with _peers_needed():
            return Pending(call(), then)


@dataclass(frozen=True)
class Groups:
    """All groups that one rank belongs to.

    ``embedding`` holds the ranks of the first and the last pipeline stage that share tied embedding weights.
    ``pp_backward`` has the members of ``pp`` and carries gradients, ``pp`` carries activations.
    ``checkpoint`` has all ranks and wants tensors on the CPU, whatever the others run on: it belongs to the thread that
    saves, whose collectives would mix with those of training otherwise.
    """

    layout: Layout
    rank: int
    at: Coordinates
    world: Group
    tp: Group
    dp: Group
    pp: Group
    pp_backward: Group
    embedding: Group
    checkpoint: Group

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the input embedding."""
        return self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.at.pp == self.layout.pp - 1


def _backend(
    store: Store, device: torch.device, bind_address: str, rank: int, size: int, timeout: timedelta
) -> Backend:
    if device.type == "cuda":
        # Only CUDA builds of torch have this class.
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, rank, size, options)
    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    gloo._devices = [ProcessGroupGloo.create_device(hostname=bind_address)]
    return ProcessGroupGloo(store, rank, size, gloo)


def build_groups(
    layout: Layout, rank: int, store: Store, device: torch.device, *, bind_address: str, timeout_s: float
) -> Groups:
    """Meet the other ranks on ``store`` (whose prefix must be this generation's own) and build every group.

    ``timeout_s`` bounds the meeting and every collective. Raises CollectiveError when ranks do not come.
    """
    at = layout.coordinates(rank)
    timeout = timedelta(seconds=timeout_s)

    def build(name: str, members: list[int], device: torch.device = device) -> Group:
        place = members.index(rank)
        if len(members) == 1:
            return Group(name, tuple(members), place, None)
        prefix = PrefixStore(f"{name}-{members[0]}", store)
        with _peers_needed():
            backend = _backend(prefix, device, bind_address, place, len(members), timeout)
        return Group(name, tuple(members), place, backend)

    def line(axis: str, places: list[int]) -> list[int]:
        return [layout.rank_of(Coordinates(**{**vars(at), axis: place})) for place in places]

    ends = sorted({0, layout.pp - 1})
    pp = build("pp", line("pp", list(range(layout.pp))))
    # NCCL has no tags and runs the messages of two ranks one after the other: two neighbours that both send first, one
    # an activation and one a gradient, would wait for each other for ever on a single communicator.
    pp_backward = build("pp-backward", list(pp.ranks)) if device.type == "cuda" else pp
    return Groups(
        layout=layout,
        rank=rank,
        at=at,
        world=build("world", list(range(layout.world_size))),
        tp=build("tp", line("tp", list(range(layout.tp)))),
        dp=build("dp", line("dp", list(range(layout.dp)))),
        pp=pp,
        pp_backward=pp_backward,
        embedding=build("embedding", line("pp", ends) if at.pp in ends else [rank]),
        checkpoint=build("checkpoint", list(range(layout.world_size)), torch.device("cpu")),
    )
