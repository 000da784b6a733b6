"""How graphs become kernels: as they are, or compiled by Inductor."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from pipegraph.kernels import internals
from pipegraph.kernels.blocks.differentiate import TraceOptions
from pipegraph.kernels.compiled.program import Compiler
from pipegraph.kernels.internals import Run


@functools.cache
def compiler(name: str) -> Compiler:
    """The compiler called so, which all stages of this process share."""
    if name == "inductor":
        missing = internals.compiler_is_missing()
        if missing is None:
            return Compiler(_inductor)
        warnings.warn(
            f'Inductor needs a C++ compiler; the stages run uncompiled, as with kernels="eager": {missing}',
            stacklevel=4,
        )
    return Compiler(_eager)


def options(name: str, recompute: str) -> TraceOptions:
    """How graphs for the compiler called so are made, for stages that share blocks."""
    return TraceOptions(recompute, functools.partial(decompositions, inductor=name == "inductor"))


def _eager(modules: Sequence[fx.GraphModule]) -> list[Run]:
    return [internals.boxed(module) for module in modules]


def _inductor(modules: Sequence[fx.GraphModule]) -> list[Run]:
    with internals.quiet():
        found = internals.compile_graphs(modules)
    for index, (module, run) in enumerate(zip(modules, found, strict=True)):
        if isinstance(run, Exception):
            reason = str(run).strip().partition("\n")[0]
            warnings.warn(
                f"Inductor cannot compile a part of a stage, which runs uncompiled: {type(run).__name__}: {reason}",
                stacklevel=2,
            )
            found[index] = internals.boxed(module)
    return found  # type: ignore[return-value]


convolution_backward: Any = torch.ops.aten.convolution_backward.default

Gradients = Sequence[Tensor | None]
"""Of the input, the weight and the bias of a convolution."""


def decompositions(inductor: bool) -> Mapping[Any, Any]:
    """What is taken apart before a graph is divided: what Inductor wants to be, and what has a part in both I and W."""
    table = internals.inductor_decompositions() if inductor else {}
    other = table.get(convolution_backward, _as_it_is)
    return {**table, convolution_backward: partial(_separate_gradients, other)}


def _as_it_is(*args: Any) -> Any:
    return NotImplemented


def _separate_gradients(other: Callable[..., Any], *args: Any, **kwargs: Any) -> Gradients:
    """The gradient of a convolution's input by itself, for I, and those of its weight and bias, for W.

    Libraries compute the two by kernels of their own in any case, so that this costs nothing.
    """
    *rest, (of_input, of_weight, of_bias) = args
    if not of_input or not (of_weight or of_bias):
        found: Gradients = other(*args, **kwargs)
        return found
    first, _, _ = convolution_backward(*rest, (True, False, False))
    _, second, third = convolution_backward(*rest, (False, of_weight, of_bias))
    return first, second, third
