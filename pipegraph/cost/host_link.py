"""Measure the link from a device to the memory of its host, which ``recompute="offload"`` copies over."""

from __future__ import annotations

import torch
from torch import Tensor

from pipegraph.cost.hardware import Link
from pipegraph.cost.machine_links import fit
from pipegraph.cost.machine_rates import Stopwatch

WITHIN_MEMORY = "copies within memory"
"""The name of the link of a CPU, whose memory is that of the host."""

_SIZES = tuple(4**power * 1024 for power in range(3, 9))  # of copies: 64 KiB to 64 MiB


def measure_host_link(stopwatch: Stopwatch) -> Link:
    """Return the link over which a tensor is copied to pinned CPU memory and back.

    On a CPU both are in one memory, and the copies are those with which the runtime emulates offload.
    """
    is_cpu = stopwatch.device.type == "cpu"
    times = [_there_and_back(stopwatch, size, is_pinned=not is_cpu) for size in _SIZES]
    latency, bandwidth = fit(times, [2 * size for size in _SIZES])
    name = WITHIN_MEMORY if is_cpu else f"{torch.cuda.get_device_name(stopwatch.device)} to pinned memory"
    return Link(latency, bandwidth, name)


def _there_and_back(stopwatch: Stopwatch, size: int, is_pinned: bool) -> float:
    device_tensor = torch.zeros(size, dtype=torch.uint8, device=stopwatch.device)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=is_pinned)

    def copy() -> Tensor:
        host.copy_(device_tensor, non_blocking=True)
        return device_tensor.copy_(host, non_blocking=True)

    return stopwatch.seconds(copy)
