"""The registry of kernels. Another kind of kernels is one more maker here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from pipegraph.errors import PipegraphError, nearest
from pipegraph.kernels.autograd import AutogradKernels
from pipegraph.kernels.interface import Loss, StageKernels

Maker = Callable[[nn.Module, Sequence[bool], Sequence[bool], Loss | None], StageKernels]
"""(stage, which inputs want a gradient, which outputs get one, the loss behind the last stage) → kernels"""

RECOMPUTE = ("none", "min-cut", "block")
"""What the backward computes again instead of keeping it: nothing, what torch's partitioner would, or the block."""


def _autograd(recompute: str) -> Maker:
    return AutogradKernels


def _traced(name: str) -> Callable[[str], Maker]:
    def maker(recompute: str) -> Maker:
        from pipegraph.kernels.compiled.compilers import compiler, options  # which take torch's own with them
        from pipegraph.kernels.traced import TracedKernels

        return partial(TracedKernels, compiler=compiler(name), options=options(name, recompute))

    return maker


_MAKERS: dict[str, Callable[[str], Maker]] = {
    "inductor": _traced("inductor"),
    "eager": _traced("eager"),
    "autograd": _autograd,
}


def names() -> tuple[str, ...]:
    """The kinds of kernels there are."""
    return tuple(_MAKERS)


def maker(name: str, recompute: str = "min-cut") -> Maker:
    """What makes the kernels `name` of the stages of one pipeline, which share what is equal in them.

    `recompute` is one of `RECOMPUTE`, by default "min-cut": also on a CPU a chain of pointwise operations is computed
    again in less time than it is written and read.
    """
    if name not in _MAKERS:
        raise PipegraphError(
            f'No kernels are called "{name}".{nearest(name, _MAKERS)} There are: {", ".join(_MAKERS)}.'
        )
    if recompute not in RECOMPUTE:
        raise PipegraphError(
            f'recompute cannot be "{recompute}".{nearest(recompute, RECOMPUTE)} There are: {", ".join(RECOMPUTE)}.'
        )
    return _MAKERS[name](recompute)


def make(
    name: str,
    stage: nn.Module,
    input_gradients: Sequence[bool],
    output_gradients: Sequence[bool],
    loss: Loss | None = None,
    recompute: str = "min-cut",
) -> StageKernels:
    """The kernels `name` of one stage.

    `input_gradients` says of each input whether its gradient is wanted, `output_gradients` of each output whether one
    will come; `loss` is the last segment of the last stage. `recompute` as for `maker`.
    """
    return maker(name, recompute)(stage, input_gradients, output_gradients, loss)
