"""What one segment costs: the unit that a planner adds up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SegmentCost:
    """Seconds and bytes of one segment, the graph between two adjacent candidate cuts, for one microbatch.

    Attributes:
        forward, input_grad, weight_grad: seconds of F, I and W.
        boundary_bytes: what crosses a cut right behind the segment; of the gradient, the same again backwards.
        saved_bytes: activations that F keeps for I and W.
        parameter_bytes: a tied weight counts where it is first used.
        flops: floating-point operations of F.
        weight_saved_bytes: what is kept from the end of I until W has run: of ``saved_bytes`` what W reads, and the
            gradients that it reads. None: as many as ``saved_bytes``.
        trained_bytes: of ``parameter_bytes``, those of parameters that have a gradient. None: all.
        buffer_bytes: buffers and constants, each where it is first used.
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
