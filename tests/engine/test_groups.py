"""Process groups over gloo: every axis of a layout reduces over the right ranks, unequal layouts included."""

import pytest
import torch

from engine.groups import MAX, CollectiveError
from engine.planning.layout import Layout
from tests.harness import groups_of, run_ranks


def _sums(rank, store, layout):
    groups = groups_of(layout, rank, store)
    out = {}
    for name in ("world", "tp", "dp", "pp", "embedding"):
        group = getattr(groups, name)
        value = torch.tensor([float(rank)])
        group.all_reduce(value).wait()
        top = torch.tensor([float(rank)])
        group.all_reduce(top, MAX).wait()
        assert top.item() == max(group.ranks)
        out[name] = value.item()
        gathered = torch.empty(group.size)
        group.all_gather(gathered, torch.tensor([float(rank)])).wait()
        assert gathered.tolist() == list(group.ranks)
        part = torch.empty(1)
        group.reduce_scatter(part, torch.arange(group.size, dtype=torch.float32)).wait()
        assert part.item() == group.rank * group.size
    if groups.pp.size > 1:
        got = torch.empty(1)
        sent = groups.pp.send(torch.tensor([float(rank)]), (groups.pp.rank + 1) % groups.pp.size)
        groups.pp.receive(got, (groups.pp.rank - 1) % groups.pp.size).wait()
        sent.wait()
        assert got.item() == groups.pp.ranks[groups.pp.rank - 1]
    return out


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(dp=3), Layout(tp=2, pp=3)], ids=str)
def test_each_group_reduces_over_its_own_ranks(layout):
    for rank, sums in enumerate(run_ranks(layout.world_size, _sums, layout)):
        at = layout.coordinates(rank)
        members = {
            "world": range(layout.world_size),
            "tp": [
                r
                for r in range(layout.world_size)
                if layout.coordinates(r).dp == at.dp and layout.coordinates(r).pp == at.pp
            ],
            "dp": [
                r
                for r in range(layout.world_size)
                if layout.coordinates(r).tp == at.tp and layout.coordinates(r).pp == at.pp
            ],
            "pp": [
                r
                for r in range(layout.world_size)
                if layout.coordinates(r).tp == at.tp and layout.coordinates(r).dp == at.dp
            ],
        }
        for name, ranks in members.items():
            assert sums[name] == sum(ranks)


def _loses_its_peer(rank, store, operation):
    groups = groups_of(Layout(pp=2), rank, store, timeout_s=20)
    groups.world.barrier()
    if rank == 1:
        return "gone"
    value = torch.ones(2)
    operations = {
        "all_reduce": lambda group: group.all_reduce(value).wait(),
        "all_gather": lambda group: group.all_gather(torch.empty(4), value).wait(),
        "reduce_scatter": lambda group: group.reduce_scatter(torch.empty(1), value).wait(),
        "barrier": lambda group: group.barrier(),
        "send": lambda group: group.send(value, 1).wait(),
        "receive": lambda group: group.receive(value, 1).wait(),
    }
    raised = []
    for _ in range(3):  # the first may still go out; after that the connection is known to be broken
        try:
            operations[operation](groups.world)
        except CollectiveError:
            raised.append("CollectiveError")
    return raised


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "barrier", "send", "receive"])
def test_a_lost_peer_is_a_collective_error_whatever_was_going_on(operation):
    """Any other exception would be taken for a fault of the rank that survived."""
    raised, gone = run_ranks(2, _loses_its_peer, operation)
    assert gone == "gone"
    assert raised and set(raised) == {"CollectiveError"}


def _comes_alone(rank, store):
    with pytest.raises(CollectiveError):
        groups_of(Layout(dp=2), rank, store, timeout_s=0.5)
    return True


def test_a_peer_that_does_not_come_to_the_meeting_is_a_collective_error():
    assert run_ranks(1, _comes_alone) == [True]
