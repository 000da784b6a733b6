"""The sizes at which `calibrate` times kernels on each kind of device, up to those of a large layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

Axis = tuple[int, ...]
Axes = Mapping[str, Axis]

_KIB, _MIB = 2**10, 2**20


@dataclass(frozen=True)
class MeasuredSizes:
    """Sizes along the axes of the tables of a profile.

    Attributes:
        matrices: m, n and k of a product.
        batched: the same of products that are computed together.
        attention: tokens of a row, and elements of a head.
        convolution: m, pixels of all images; n, channels that are computed; k, elements of a window of all channels.
        batch: matrices, or heads, that are computed together.
        images: of a convolution.
        streamed: bytes that a sum of two tensors reads and writes.
        sample: seconds; of shorter runs several make one sample, or the clock would be measured.
    """

    matrices: Axes
    batched: Axes
    attention: Axes
    convolution: Axes
    batch: int
    images: int
    streamed: Axis
    sample: float


def _products(*sizes: int) -> Axes:
    return dict.fromkeys("mnk", sizes)


_CPU: Final = MeasuredSizes(
    matrices=_products(16, 128, 1024),
    batched=_products(16, 128),
    attention={"length": (32, 128, 512), "head_dim": (32, 128)},
    # Two images of 8 × 8 to 64 × 64 pixels; windows of 3 × 3 over 3, 32 and 256 channels.
    convolution={"m": (128, 1152, 8192), "n": (16, 128), "k": (27, 288, 2304)},
    batch=16,
    images=2,
    streamed=tuple(3 * size for size in (4 * _KIB, 32 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB)),
    sample=50e-6,
)
_GPU: Final = MeasuredSizes(
    matrices=_products(128, 512, 2048, 8192),
    batched=_products(64, 512, 2048),
    attention={"length": (256, 1024, 4096), "head_dim": (64, 128)},
    # Sixteen images of 16 × 16 to 128 × 128 pixels; windows of 3 × 3 over 3, 64 and 256 channels.
    convolution={"m": (4096, 65536, 262144), "n": (64, 256), "k": (27, 576, 2304)},
    batch=32,
    images=16,
    streamed=tuple(3 * size for size in (64 * _KIB, _MIB, 16 * _MIB, 64 * _MIB, 512 * _MIB)),
    sample=1e-3,  # to wait for a GPU takes the host some 20 µs
)


def sizes_on(device: str) -> MeasuredSizes:
    """The sizes for a kind of device: cpu, or a GPU."""
    return _CPU if device == "cpu" else _GPU
