"""Causal self-attention with grouped queries, heads cut over the tensor-parallel group."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.groups import Group
from engine.models.rotary import rotate
from engine.planning.config import ModelConfig
from engine.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The attention core: the one place where a kernel is chosen.

    ``query`` [seq, batch, heads, head_dim], ``key`` and ``value`` [seq, batch, kv_heads, head_dim] ->
    [seq, batch, heads * head_dim]. Query head i reads key/value head i // (heads / kv_heads).
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [batch, heads, seq, head_dim]
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return y.permute(2, 0, 1, 3).flatten(2)


class SelfAttention(nn.Module):
    """Fused query, key and value projection, attention over this rank's heads, output projection."""

    def __init__(
        self, name: str, config: ModelConfig, *, group: Group, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.head_dim = config.attention_head_dim
        query_size, kv_size = config.num_attention_heads * self.head_dim, config.kv_heads * self.head_dim
        assert config.kv_heads % group.size == 0, f"{config.kv_heads} kv heads over {group.size} ranks"
        self.query_key_value = ColumnParallelLinear(
            config.hidden_size,
            {f"{name}.query": query_size, f"{name}.key": kv_size, f"{name}.value": kv_size},
            bias=config.bias,
            group=group,
            dtype=dtype,
            device=device,
        )
        self.output = RowParallelLinear(
            query_size,
            config.hidden_size,
            name=f"{name}.output",
            init="normal_scaled",
            bias=config.bias,
            group=group,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: Tensor, rotary: Tensor | None) -> Tensor:
        """``x`` [seq, batch, hidden]; ``rotary`` is the ``rotary_table``, None for learned positions."""
        fused = self.query_key_value(x)
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)) for part in fused.split(self.query_key_value.shares, dim=-1)
        )
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        y: Tensor = self.output(causal_attention(query, key, value))
        return y
