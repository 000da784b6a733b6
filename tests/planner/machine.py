"""Hardware and models with figures that can be computed by hand."""

from __future__ import annotations

import torch
from torch import nn

import pipegraph
from pipegraph.cost.hardware import Hardware, Link, Links, SizeTable
from pipegraph.graph.captured import Captured

FULL_RATE = SizeTable({}, 1.0)

MACHINE = Hardware(
    name="machine",
    device="one that attains 1 TFLOP/s, where nothing else takes time",
    memory_bytes=2**30,
    peak_flops={"float32": 1e12},
    attained_flops={"matmul": {"any": FULL_RATE}},
    memory_bandwidth=1e18,
    attained_bandwidth=FULL_RATE,
    kernel_floor=0.0,
    links=Links(8, Link(0.0, 1e18, "none")),
)


def linears(*widths: int, rows: int = 16) -> Captured:
    """Layers without bias, from 64 values to 64, but for some that go to more; then their sum of a row."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, width, bias=False) for width in widths))
    return pipegraph.capture(model, (torch.randn(rows, 64),))
