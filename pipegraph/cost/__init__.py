"""What segments and stages of a model cost: seconds of F, I and W, and bytes.

hardware/       profiles of devices: rates, links, and where each figure is from
calibrate.py    measure such a profile on this machine
segments/       a model's chain of segments, and its distinct blocks as graphs of F, I and W
roofline/       the seconds of a graph on a profile
block_times.py  the seconds of distinct blocks, as they run on this machine
measured_layers.py  the seconds of those that run here within a short time, and of the rest by the roofline
training_state.py  what training holds for each parameter, by precision and optimizer
price.py        a captured model → the cost of each of its segments
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = ["MemoryFactors", "SegmentCost", "TransientBytes"]


class TransientBytes(NamedTuple):
    """Bytes that F, I, W and B need while they run, beyond the larger of the bytes held before and after.

    Before, these are the activations that are kept then. After, these are the activations that are kept then and, for W
    and B, the gradients of parameters that they made (`SegmentCost.added_bytes`), which are held in addition to the
    accumulated gradients until they are added to them.
    """

    forward: int = 0
    input_grad: int = 0
    weight_grad: int = 0
    backward: int = 0


NO_BYTES = TransientBytes()


class MemoryFactors(NamedTuple):
    """How many times a rank holds each part of the memory of its stages.

    Attributes:
        parameters: of the bytes of the parameters in the dtype that kernels compute in, without copies.
        copies: of the same bytes.
        gradients: of the trained ones among these.
        optimizer: of the bytes of the optimizer's state.
        allowance: of everything that comes and goes in a step, the part on top that the allocator cannot use.
    """

    parameters: float = 1.0
    copies: float = 0.0
    gradients: float = 1.0
    optimizer: float = 1.0
    allowance: float = 0.0


ONCE: Final = MemoryFactors()
"""Of a rank that holds everything once, in the dtype of the parameters."""


@dataclass(frozen=True)
class SegmentCost:
    """Seconds and bytes of one segment, the graph between two adjacent candidate cuts, for one microbatch.

    Attributes:
        forward, input_grad, weight_grad: seconds of F, I and W.
        boundary_bytes: the bytes that cross a cut right after the segment. The gradient has the same number.
        saved_bytes: activations that F keeps for I and W.
        parameter_bytes: a tied weight counts at its first use.
        flops: floating-point operations of F.
        weight_saved_bytes: the bytes kept from the end of I until W has run: the part of ``saved_bytes`` that W reads,
            and the gradients that it reads. None: equal to ``saved_bytes``.
        trained_bytes: of ``parameter_bytes``, those of parameters that have a gradient. None: all.
        buffer_bytes: buffers and constants, each at its first use.
        offloaded_bytes: of ``saved_bytes``, those that wait for the backward in CPU memory.
        transient_bytes: the bytes that F, I, W and B need while they run. A stage has the maximum of its segments.
        added_bytes: of ``trained_bytes``, those of parameters whose gradients W and B make before they add them. The
            gradients of others, products of two matrices, are added while they are computed. None: all.
        optimizer_bytes: the optimizer's state for the parameters that have a gradient. None: two moments, as AdamW has,
            each as large as the parameter.
    """

    forward: float
    input_grad: float
    weight_grad: float
    boundary_bytes: int = 0
    saved_bytes: int = 0
    parameter_bytes: int = 0
    flops: int = 0
    weight_saved_bytes: int | None = None
    trained_bytes: int | None = None
    buffer_bytes: int = 0
    offloaded_bytes: int = 0
    transient_bytes: TransientBytes = NO_BYTES
    added_bytes: int | None = None
    optimizer_bytes: int | None = None

    @property
    def weight_saved(self) -> int:
        """The value of ``weight_saved_bytes``, or the one that None stands for."""
        return self.saved_bytes if self.weight_saved_bytes is None else self.weight_saved_bytes

    @property
    def trained(self) -> int:
        """The value of ``trained_bytes``, or the one that None stands for."""
        return self.parameter_bytes if self.trained_bytes is None else self.trained_bytes

    @property
    def added(self) -> int:
        """The value of ``added_bytes``, or the one that None stands for."""
        return self.trained if self.added_bytes is None else self.added_bytes

    @property
    def optimizer(self) -> int:
        """The value of ``optimizer_bytes``, or the one that None stands for."""
        return 2 * self.trained if self.optimizer_bytes is None else self.optimizer_bytes
