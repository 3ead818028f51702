"""The feed-forward part of a layer: GELU (GPT-2) or SwiGLU (Llama), inner features cut over the TP group."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.groups import Group
from engine.planning.config import ModelConfig
from engine.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """hidden -> ffn -> hidden. With SwiGLU the gate and the up projection are one product."""

    def __init__(
        self, name: str, config: ModelConfig, *, group: Group, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.gated = config.activation == "swiglu"
        parts = ("gate", "up") if self.gated else ("up",)
        self.inner = ColumnParallelLinear(
            config.hidden_size,
            {f"{name}.{part}": config.ffn_hidden_size for part in parts},
            bias=config.bias,
            group=group,
            dtype=dtype,
            device=device,
        )
        self.down = RowParallelLinear(
            config.ffn_hidden_size,
            config.hidden_size,
            name=f"{name}.down",
            init="normal_scaled",
            bias=config.bias,
            group=group,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[seq, batch, hidden] -> [seq, batch, hidden]."""
        inner = self.inner(x)
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner, approximate="tanh")  # the "gelu_new" of GPT-2
        y: Tensor = self.down(inner)
        return y
