"""What this node has: devices, their memory, their peak arithmetic rate. Runs in a forked child of the warm parent."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

_GEMM_SIZE = 768
_GEMM_SECONDS = 0.3

DENSE_BF16_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Peak dense bf16 rate from the makers' data sheets (SXM variants), by a word of the device's name."""


class DeviceChoice(BaseModel):
    """Which devices an agent offers: ``num_devices`` None means every one that there is."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["cpu", "cuda"]
    num_devices: int | None

    @classmethod
    def parse(cls, text: str) -> DeviceChoice:
        """Read ``cpu:N``, ``cuda`` or ``cuda:N``; raises ValueError for anything else."""
        kind, colon, number = text.partition(":")
        if kind == "cuda" and not colon:
            return cls(kind="cuda", num_devices=None)
        if kind in ("cpu", "cuda") and number.isdigit() and int(number) > 0:
            return cls.model_validate({"kind": kind, "num_devices": int(number)})
        raise ValueError(f"devices: {text!r} is none of cpu:N, cuda, cuda:N")


def measure(report: Callable[[Any], None], kind: str, num_devices: int | None, num_threads: int) -> None:
    """Report ``{"devices": [...], "versions": {...}}`` (devices as in ``everstep.protocol.messages.Device``)."""
    import torch

    devices = _cuda_devices(num_devices) if kind == "cuda" else _cpu_devices(num_devices or 1, num_threads)
    report({"devices": devices, "versions": {"torch": torch.__version__, "everstep": version("everstep")}})


def peak_flops_of(name: str) -> float:
    """The data sheet's dense bf16 rate of a GPU with this name; 0 when it is not in the table."""
    words = name.replace("-", " ").split()
    return next((flops for word, flops in DENSE_BF16_FLOPS.items() if word in words), 0.0)


def _cpu_devices(number: int, num_threads: int) -> list[dict[str, Any]]:
    flops = _cpu_flops(num_threads)
    memory = _host_memory_bytes() // number
    return [
        {"kind": "cpu", "index": index, "memory_bytes": memory, "peak_flops": flops, "name": "cpu"}
        for index in range(number)
    ]


def _cpu_flops(num_threads: int) -> float:
    import torch

    torch.set_num_threads(num_threads)
    left = torch.ones(_GEMM_SIZE, _GEMM_SIZE)
    right = torch.ones(_GEMM_SIZE, _GEMM_SIZE)
    out = left @ right
    best = float("inf")
    end = time.perf_counter() + _GEMM_SECONDS
    while (began := time.perf_counter()) < end:
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - began)
    return 2 * _GEMM_SIZE**3 / best


def _cuda_devices(wanted: int | None) -> list[dict[str, Any]]:
    import torch

    there = torch.cuda.device_count()
    if there == 0 or (wanted or 0) > there:
        raise ValueError(f"devices: {wanted or 'at least one'} CUDA device(s) wanted, {there} found")
    found = []
    for index in range(wanted or there):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "kind": "cuda",
                "index": index,
                "memory_bytes": properties.total_memory,
                "peak_flops": peak_flops_of(properties.name),
                "name": properties.name,
            }
        )
    return found


def _host_memory_bytes() -> int:
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        return min(total, int(text))
    return total
