"""Number formats, and what a device must be told so that a run computes in the format that it asked for."""

from __future__ import annotations

from typing import Literal

import torch


def model_dtype(precision: Literal["fp32", "bf16", "fp16"]) -> torch.dtype:
    """Type of parameters and activations. Gradients are summed and weights updated in fp32 whatever it is."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def configure_device(device: torch.device, num_threads: int) -> None:
    """Make ``device`` this process's own, and fp32 mean fp32 on it.

    TF32, which rounds the factors of fp32 products to 10 bits, is switched off for products and for cuDNN.
    ``num_threads`` bounds the threads of one CPU operation.
    """
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.backends.cudnn.fp32_precision = "ieee"
