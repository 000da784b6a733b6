"""The registry of kernels. A new kind of kernels is one more maker here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from pipegraph.arguments import require_type
from pipegraph.errors import ArgumentError, PipegraphError, nearest
from pipegraph.kernels.autograd import AutogradKernels
from pipegraph.kernels.interface import Loss, StageKernels

Maker = Callable[[nn.Module, Sequence[bool], Sequence[bool], Loss | None], StageKernels]
"""(stage, which inputs want a gradient, for which outputs one arrives, the loss behind the last stage) → kernels"""

RECOMPUTE = ("none", "min-cut", "block")
"""What the backward computes again instead of reading it: nothing, what torch's partitioner chooses, or the block."""


def _autograd(recompute: str, max_variants: int, strict: bool) -> Maker:
    if strict:
        raise PipegraphError(
            'kernels="autograd" leaves every stage to autograd, which strict=True refuses.\nTry: one of the two.'
        )
    return AutogradKernels


def _traced(name: str) -> Callable[[str, int, bool], Maker]:
    def maker(recompute: str, max_variants: int, strict: bool) -> Maker:
        from pipegraph.kernels.compilers import compiler, options  # which import torch's compiler
        from pipegraph.kernels.traced import TracedKernels

        return partial(
            TracedKernels,
            compiler=compiler(name),
            options=options(name, recompute),
            max_variants=max_variants,
            strict=strict,
        )

    return maker


_MAKERS: dict[str, Callable[[str, int, bool], Maker]] = {
    "inductor": _traced("inductor"),
    "eager": _traced("eager"),
    "autograd": _autograd,
}


def names() -> tuple[str, ...]:
    """Return the names of all kinds of kernels."""
    return tuple(_MAKERS)


def check_recompute(recompute: object) -> None:
    """Raise ArgumentError unless this is one of `RECOMPUTE`."""
    if recompute not in RECOMPUTE:
        raise ArgumentError(
            f'recompute cannot be "{recompute}".{nearest(str(recompute), RECOMPUTE)} There are: {", ".join(RECOMPUTE)}.'
        )


def maker(name: str, recompute: str = "min-cut", max_variants: int = 8, strict: bool = False) -> Maker:
    """Return what makes the kernels of one pipeline's stages. The stages share equal blocks.

    Args:
        name: one of `names()`.
        recompute: one of `RECOMPUTE`. "min-cut" is the default on every device: also on a CPU, computing a chain of
            pointwise operations again takes less time than writing and reading its results.
        max_variants: how many variants of a stage are traced, for different modes, dtypes, branches on sizes and so
            on. Further ones are left to autograd, with a warning.
        strict: whether that, and a stage that cannot be traced, is an error instead.

    Raises:
        PipegraphError: an argument has another value.
    """
    if name not in _MAKERS:
        raise PipegraphError(
            f'No kernels are called "{name}".{nearest(name, _MAKERS)} There are: {", ".join(_MAKERS)}.'
        )
    check_recompute(recompute)
    require_type(max_variants, int, "max_variants is a whole number from 1 on", "max_variants=8")
    if max_variants < 1:
        raise PipegraphError(f"max_variants cannot be {max_variants}: a stage is traced at least once.")
    return _MAKERS[name](recompute, max_variants, strict)


def make(
    name: str,
    stage: nn.Module,
    input_gradients: Sequence[bool],
    output_gradients: Sequence[bool],
    loss: Loss | None = None,
    recompute: str = "min-cut",
) -> StageKernels:
    """Return the kernels of one stage.

    Args:
        name, recompute: as for `maker`.
        stage: the module.
        input_gradients: of each input, whether its gradient is wanted.
        output_gradients: of each output, whether a gradient arrives.
        loss: the last segment of the last stage.
    """
    return maker(name, recompute)(stage, input_gradients, output_gradients, loss)
