"""Which layouts a run can take, for every number of devices, and which one the planner prefers."""

from __future__ import annotations

import pytest

from engine.planning.config import CheckpointConfig, CorpusConfig, ModelConfig, RunConfig, TrainConfig
from engine.planning.layout import Layout, illegal_reasons
from engine.planning.search import fits_nodes, legal_layouts, rank_layouts
from engine.planning.step_time import Hardware, step_time_s


def run(*, heads: int = 4, kv_heads: int | None = 2, layers: int = 6, batch: int = 8, hidden: int = 192) -> RunConfig:
    return RunConfig(
        model=ModelConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            ffn_hidden_size=4 * hidden,
            vocab_size=2000,
            max_sequence_length=128,
        ),
        data=CorpusConfig(path="tokens"),
        train=TrainConfig(sequence_length=128, global_batch_size=batch, train_steps=10),
        checkpoint=CheckpointConfig(directory="runs"),
    )


MODELS = {
    "4 heads, 2 kv heads, 6 layers": run(),
    "6 heads, 5 layers": run(heads=6, kv_heads=None, layers=5),
    "1 head, 1 layer, batch 1": run(heads=1, kv_heads=None, layers=1, batch=1),
    "8 heads, 3 layers, batch 3": run(heads=8, kv_heads=4, layers=3, batch=3),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_search_finds_exactly_the_legal_layouts(name: str, num_ranks: int) -> None:
    this = MODELS[name]
    sizes = range(1, num_ranks + 1)
    everything = [Layout(tp=tp, pp=pp, dp=dp) for tp in sizes for pp in sizes for dp in sizes]
    legal = {str(one) for one in everything if not illegal_reasons(one, this.model, this.train, num_ranks=num_ranks)}
    found = legal_layouts(this, num_ranks)
    assert {str(one) for one in found} == legal
    assert len(found) == len(legal)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "devices", [[1] * n for n in range(1, 9)] + [[2] * n for n in range(1, 5)] + [[2, 2, 2, 1], [4, 3]]
)
def test_every_choice_is_legal_and_tp_stays_in_a_node(name: str, devices: list[int]) -> None:
    this = MODELS[name]
    ranked = rank_layouts(this, devices, Hardware(), current=Layout(tp=2, pp=2, dp=1))
    assert ranked
    for candidate in ranked:
        layout = candidate.layout
        assert not illegal_reasons(layout, this.model, this.train, num_ranks=sum(devices))
        assert candidate.spares == sum(devices) - layout.world_size
        if max(devices) > 1:
            assert sum(size // layout.tp for size in devices) >= layout.pp * layout.dp
        assert max(len(layout.microbatches_of_replica(d, this.train.num_microbatches)) for d in range(layout.dp)) >= 1
    seconds = [candidate.step_s for candidate in ranked]
    assert seconds[0] <= min(seconds) / (1 - 0.03) + 1e-12


@pytest.mark.parametrize(
    ("devices", "best"),
    [
        ([1], "TP1·PP1·DP1"),
        ([2], "TP1·PP1·DP2"),
        ([2, 1], "TP1·PP1·DP3"),
        ([2, 2], "TP1·PP1·DP4"),
        ([2, 2, 1], "TP1·PP1·DP4"),  # 8 micro-batches: a fifth replica would change nothing
        ([2, 2, 2], "TP2·PP1·DP3"),  # six replicas would run 2 micro-batches each, as four do
        ([2, 2, 2, 1], "TP2·PP1·DP3"),
        ([2, 2, 2, 2], "TP1·PP1·DP8"),
    ],
)
def test_the_preferred_layout_for_one_to_eight_devices(devices: list[int], best: str) -> None:
    assert str(rank_layouts(MODELS["4 heads, 2 kv heads, 6 layers"], devices, Hardware())[0].layout) == best


def test_three_of_four_devices_left_of_tp2_pp2_use_all_three() -> None:
    """4 query heads and 2 kv heads allow no TP 3: the planner goes to another kind of parallelism."""
    ranked = rank_layouts(run(), [2, 1], Hardware(), current=Layout(tp=2, pp=2))
    assert ranked[0].layout.world_size == 3
    assert all(candidate.layout.tp != 3 for candidate in ranked)


def test_no_layout_for_more_ranks_than_the_model_can_be_cut_into() -> None:
    assert rank_layouts(MODELS["1 head, 1 layer, batch 1"], [2, 2], Hardware(), min_ranks=2) == []


def test_limits_on_ranks_hold() -> None:
    worlds = {c.layout.world_size for c in rank_layouts(run(), [2] * 4, Hardware(), min_ranks=3, max_ranks=5)}
    assert worlds == {3, 4, 5}


def test_near_equals_keep_the_present_cut() -> None:
    """TP1·DP8 and TP2·DP4 are predicted within 1 %: a job keeps the one of the two whose TP it has."""
    big = run(hidden=256)
    assert str(rank_layouts(big, [2] * 4, Hardware(), current=Layout(dp=6))[0].layout) == "TP1·PP1·DP8"
    assert str(rank_layouts(big, [2] * 4, Hardware(), current=Layout(tp=2, dp=3))[0].layout) == "TP2·PP1·DP4"


def test_tp_groups_fit_within_nodes_unless_every_node_has_one_device() -> None:
    assert fits_nodes(Layout(tp=2, dp=3), [2, 2, 2])
    assert not fits_nodes(Layout(tp=2, dp=3), [3, 3])  # a third group would straddle the two nodes
    assert fits_nodes(Layout(tp=2, dp=2), [1, 1, 1, 1])
    assert not fits_nodes(Layout(tp=4), [2, 2])


def test_step_time_knows_bubble_imbalance_and_links() -> None:
    this, hardware = run(), Hardware(latency_s=0.0, overhead_s=0.0)

    def seconds(tp: int, pp: int, dp: int, **more: bool) -> float:
        return step_time_s(this, Layout(tp=tp, pp=pp, dp=dp), hardware, **more)

    assert seconds(1, 1, 2) < seconds(1, 1, 1)
    assert seconds(1, 2, 1) > seconds(1, 1, 2)  # bubble
    assert seconds(1, 1, 5) == pytest.approx(seconds(1, 1, 4), rel=0.02)  # ceil(8/5) = ceil(8/4)
    assert seconds(2, 1, 1) < seconds(2, 1, 1, tp_in_node=False)  # slower links between nodes


@pytest.mark.parametrize("field", ["flops_per_s", "intra_node_bytes_per_s", "inter_node_bytes_per_s"])
def test_hardware_refuses_what_cannot_be(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Hardware(**{field: 0.0})
