"""LayerNorm and RMSNorm over the hidden dimension; torch's kernels compute both in fp32 for bf16 activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.parameters import Initializer, ParameterSpec, Segment, attach
from engine.planning.config import ModelConfig


class Norm(nn.Module):
    """The norm of ``config``, whole on every TP rank: ``<name>.weight`` and, for LayerNorm, ``<name>.bias``."""

    def __init__(self, name: str, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        size = config.hidden_size

        def parameter(part: str, init: Initializer) -> nn.Parameter:
            whole = Segment(f"{name}.{part}", (size,), (0,), (size,), 0, init)
            return attach(
                nn.Parameter(torch.empty(size, dtype=dtype, device=device)),
                ParameterSpec((size,), (whole,), tp_replicated=True, decay=False),
            )

        self.weight = parameter("weight", "ones")
        self.bias = parameter("bias", "zeros") if config.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
