"""Kernels: the forward, input gradient and weight gradient of one stage, by name.

make("autograd", stage, …) ──▶ StageKernels ── forward ──▶ Forward(outputs, loss, saved)
                                            └─ backward | input_backward, then weight_backward
"""

from pipegraph.kernels.interface import Forward, Loss, StageKernels
from pipegraph.kernels.make import make, names

__all__ = ["Forward", "Loss", "StageKernels", "make", "names"]
