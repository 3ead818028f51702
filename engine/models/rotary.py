"""Rotary position embedding (Su et al. 2021) in the half-split convention of Hugging Face's Llama.

Feature i of a head turns together with feature i + head_dim / 2, by the angle position * theta ** (-2 i / head_dim).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(length: int, head_dim: int, theta: float, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosines and sines [2, length, 1, 1, head_dim / 2], in ``dtype`` but at least fp32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    table = torch.stack([angles.cos(), angles.sin()])[:, :, None, None, :]
    return table.to(device=device, dtype=torch.promote_types(dtype, torch.float32))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn ``x`` [seq, batch, heads, head_dim] by its positions 0..seq-1; computed in the table's dtype."""
    cosine, sine = table[:, : x.shape[0]]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(x.dtype)
