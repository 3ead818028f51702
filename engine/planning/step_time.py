"""Predicted seconds of one step of a run in a layout: a simple model that ranks layouts, with its assumptions typed.

step = pipeline + gradient exchange + optimizer + fixed overhead, where

* pipeline = (m + pp - 1) · t: m micro-batches on the busiest replica, t seconds that the slowest stage takes for one
  micro-batch forward and backward (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
  Using Megatron-LM", section 2.2: the bubble is (pp - 1) / m);
* t = floating-point work / tp + tensor-parallel all-reduces (two forward and two backward for each layer, as many
  bytes as one activation, ring factor 2(tp - 1)/tp) + one activation each way to the neighbouring stage;
* gradient exchange = ring reduce-scatter + all-gather of the rank's parameters over dp, part of it hidden behind
  backward.

Backward counts twice forward. Nothing here knows a device that is slow or a link that is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.planning.config import ModelConfig, RunConfig
from engine.planning.flops import num_matrix_parameters
from engine.planning.layout import Layout

BYTES_PER_VALUE = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Hardware:
    """What the model assumes of devices and links; the defaults are those of CPU ranks over loopback.

    Bandwidths are bytes a second that one rank sees, ``latency_s`` is the fixed cost of one collective or message.
    """

    flops_per_s: float = 2e10
    intra_node_bytes_per_s: float = 2e9
    inter_node_bytes_per_s: float = 1e9
    latency_s: float = 2e-4
    hidden_gradient_share: float = 0.5
    overhead_s: float = 2e-3

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "intra_node_bytes_per_s", "inter_node_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")


def gpu_hardware(peak_flops: float) -> Hardware:
    """GPUs with NVLink inside a node and one 400 Gbit/s port each; 40 % of the peak is what training reaches."""
    return Hardware(
        flops_per_s=0.4 * peak_flops,
        intra_node_bytes_per_s=2e11,
        inter_node_bytes_per_s=4e10,
        latency_s=2e-5,
        overhead_s=1e-3,
    )


def cpu_hardware(peak_flops: float) -> Hardware:
    """CPU ranks over loopback or Ethernet; half of a GEMM's measured speed is what training reaches."""
    return Hardware(flops_per_s=0.5 * peak_flops)


def layer_parameters(model: ModelConfig) -> int:
    """Weights in the matrices of one decoder layer."""
    return (num_matrix_parameters(model) - model.vocab_size * model.hidden_size) // model.num_layers


def stage_forward_flops(run: RunConfig, layout: Layout, stage: int) -> float:
    """Floating-point operations of one micro-batch, forward, in one stage, over its whole tensor-parallel group."""
    model, train = run.model, run.train
    tokens = train.micro_batch_size * train.sequence_length
    query = model.num_attention_heads * model.attention_head_dim
    layer = 2.0 * layer_parameters(model) + 4.0 * train.sequence_length * query
    head = 2.0 * model.hidden_size * model.vocab_size if stage == layout.pp - 1 else 0.0
    return tokens * (len(layout.layers_of_stage(stage, model.num_layers)) * layer + head)


def step_time_s(run: RunConfig, layout: Layout, hardware: Hardware, *, tp_in_node: bool = True) -> float:
    """Predicted seconds of one step. ``tp_in_node``: whether each tensor-parallel group sits in one node."""
    model, train = run.model, run.train
    value_bytes = BYTES_PER_VALUE[train.precision]
    activation_bytes = train.micro_batch_size * train.sequence_length * model.hidden_size * value_bytes
    tp_bandwidth = hardware.intra_node_bytes_per_s if tp_in_node else hardware.inter_node_bytes_per_s
    all_reduce_s = 0.0
    if layout.tp > 1:
        ring_bytes = 2 * (layout.tp - 1) / layout.tp * activation_bytes
        all_reduce_s = ring_bytes / tp_bandwidth + hardware.latency_s
    send_s = activation_bytes / hardware.inter_node_bytes_per_s + hardware.latency_s if layout.pp > 1 else 0.0

    slowest_stage_s = 0.0
    for stage in range(layout.pp):
        compute_s = 3 * stage_forward_flops(run, layout, stage) / layout.tp / hardware.flops_per_s
        layers = len(layout.layers_of_stage(stage, model.num_layers))
        slowest_stage_s = max(slowest_stage_s, compute_s + 4 * layers * all_reduce_s + 2 * send_s)
    busiest_microbatches = -(-train.num_microbatches // layout.dp)
    pipeline_s = (busiest_microbatches + layout.pp - 1) * slowest_stage_s

    longest = max(len(layout.layers_of_stage(stage, model.num_layers)) for stage in range(layout.pp))
    parameters = (longest * layer_parameters(model) + model.hidden_size * model.vocab_size) / layout.tp
    exchange_s = 0.0
    if layout.dp > 1:
        ring_bytes = (layout.dp - 1) / layout.dp * parameters * (4 + value_bytes)  # fp32 gradients, then parameters
        exchange_s = ring_bytes / hardware.inter_node_bytes_per_s + 2 * hardware.latency_s
        exchange_s *= 1 - hardware.hidden_gradient_share
    optimizer_s = 20.0 * parameters / layout.dp / hardware.flops_per_s
    return pipeline_s + exchange_s + optimizer_s + hardware.overhead_s
