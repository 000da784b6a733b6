"""Kernels: the forward, input gradient and weight gradient of one stage, by name.

make("inductor", stage, …) ──▶ StageKernels ── forward ──▶ Forward(outputs, loss, saved)
                                            └─ backward | input_backward, then weight_backward

How a stage is traced and compiled ("inductor", "eager"), when it is first called:

stage ─ differentiate ─▶ blocks: equal module calls, traced once ─┐
                     └─▶ joint graph, a call of a block one node ─┴─ divide ─▶ F, I, W, B ─ program ─▶ kernels
"""

from pipegraph.kernels.interface import (
    DrawKeys,
    Dynamic,
    Forward,
    Loss,
    LowPrecisionKernels,
    OffloadedValues,
    SeededKernels,
    SizedKernels,
    StageKernels,
)
from pipegraph.kernels.registry import Maker, VariantOptions, make, maker, makers, names

__all__ = [
    "DrawKeys",
    "Dynamic",
    "Forward",
    "Loss",
    "LowPrecisionKernels",
    "Maker",
    "OffloadedValues",
    "SeededKernels",
    "SizedKernels",
    "StageKernels",
    "VariantOptions",
    "make",
    "maker",
    "makers",
    "names",
]
