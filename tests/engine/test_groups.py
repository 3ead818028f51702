"""Process groups over gloo: every axis of a layout reduces over the right ranks, unequal layouts included."""

import pytest
import torch

from engine.groups import MAX
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
