"""Measure the floating-point operations per second of products of matrices, convolutions and attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pipegraph.cost.calibration.stopwatch import Stopwatch
from pipegraph.cost.hardware.size_table import SizeTable, Values

_MATRICES = {"m": (16, 128, 1024), "n": (16, 128, 1024), "k": (16, 128, 1024)}
_BATCHED = {"m": (16, 128), "n": (16, 128), "k": (16, 128)}
_ATTENTION = {"length": (32, 128, 512), "head_dim": (32, 128)}
_BATCH = 16  # matrices, or heads
# Two images of 8 × 8 to 64 × 64 pixels; windows of 3 × 3 over 3, 32 and 256 channels.
_CONVOLUTION = {"m": (128, 1152, 8192), "n": (16, 128), "k": (27, 288, 2304)}
_IMAGES, _WINDOW = 2, 9

_TOO_SLOW = 8.0

Axes = Mapping[str, Sequence[int]]


def measure_compute_rates(stopwatch: Stopwatch, dtype: torch.dtype) -> dict[str, SizeTable]:
    """Kind of kernel → floating-point operations per second, over its sizes; nothing for a dtype that the device has
    no operations for, and which takes many times as long as float32.
    """
    if stopwatch.seconds(_probe(stopwatch, dtype)) > _TOO_SLOW * stopwatch.seconds(_probe(stopwatch, torch.float32)):
        return {}

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=stopwatch.device)

    def matmul(m: int, n: int, k: int) -> list[float]:
        first, second = random(m, k), random(k, n)
        return [2 * m * n * k / stopwatch.seconds(lambda: torch.mm(first, second))]

    def batched(m: int, n: int, k: int) -> list[float]:
        first, second = random(_BATCH, m, k), random(_BATCH, k, n)
        return [2 * _BATCH * m * n * k / stopwatch.seconds(lambda: torch.bmm(first, second))]

    def attention(length: int, head_dim: int) -> list[float]:
        inputs = [random(1, _BATCH, length, head_dim) for _ in range(3)]
        flops = 4 * _BATCH * length * length * head_dim
        # Backward, the scores are computed again, and four more products.
        return _both(stopwatch, F.scaled_dot_product_attention, inputs, flops, 2.5 * flops)

    def convolution(m: int, n: int, k: int) -> list[float]:
        side = round((m / _IMAGES) ** 0.5)
        inputs = [random(_IMAGES, k // _WINDOW, side, side), random(n, k // _WINDOW, 3, 3)]
        flops = 2 * m * n * k
        return _both(stopwatch, lambda image, weight: F.conv2d(image, weight, padding=1), inputs, flops, 2 * flops)

    return (
        _tables(_MATRICES, matmul, "matmul")
        | _tables(_BATCHED, batched, "batched_matmul")
        | _tables(_ATTENTION, attention, "attention", "attention_backward")
        | _tables(_CONVOLUTION, convolution, "convolution", "convolution_backward")
    )


def _probe(stopwatch: Stopwatch, dtype: torch.dtype) -> Callable[[], Tensor]:
    matrix = torch.ones(128, 128, dtype=dtype, device=stopwatch.device)
    return lambda: torch.mm(matrix, matrix)


def _both(
    stopwatch: Stopwatch, function: Callable[..., Tensor], inputs: Sequence[Tensor], forward: float, backward: float
) -> list[float]:
    """The rates of a forward and a backward that need so many operations."""
    with torch.no_grad():
        first = stopwatch.seconds(lambda: function(*inputs))
    result = function(*(each.requires_grad_() for each in inputs))
    gradient = torch.ones_like(result)
    second = stopwatch.seconds(lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True))
    return [forward / first, backward / second]


def _tables(axes: Axes, measure: Callable[..., list[float]], *kinds: str) -> dict[str, SizeTable]:
    """What is measured at each combination of sizes: one table for each kind."""
    found = {sizes: measure(*sizes) for sizes in itertools.product(*axes.values())}
    return {
        kind: SizeTable(
            {name: tuple(map(float, sizes)) for name, sizes in axes.items()},
            _nested(list(axes.values()), lambda *sizes, at=index: found[sizes][at]),
        )
        for index, kind in enumerate(kinds)
    }


def _nested(axes: Sequence[Sequence[int]], figure: Callable[..., float], *sizes: int) -> Values:
    if not axes:
        return figure(*sizes)
    return tuple(_nested(axes[1:], figure, *sizes, size) for size in axes[0])
