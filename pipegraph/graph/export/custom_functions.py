"""Custom ``torch.autograd.Function``s of a model: is the backward of each the derivative of its forward?

``torch.export`` keeps the forward of a Function and silently drops its backward. What a package differentiates is then
the forward: the same for an explicit GELU, something else for a straight-through estimator.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction

from pipegraph.graph.internals import pytree

_TOLERANCE = 1e-4
_LARGEST = 2**22  # elements of an argument on which a Function is tried


class LostBackwardError(Exception):
    """The backward of a Function is not the derivative of its forward."""

    def __init__(self, function: type) -> None:
        super().__init__(f"the backward of {function.__qualname__} is not the derivative of its forward")


class CustomFunctions:
    """Applies the Functions of a model while it is exported, and refuses those whose backward would be lost.

    Args:
        allow_derivative: whether to take the derivative of a forward instead of a backward that differs from it.
    """

    def __init__(self, allow_derivative: bool) -> None:
        self._allow_derivative = allow_derivative
        self._checked: set[type] = set()

    def apply(self, function: type, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply a Function. Run what a reentrant ``torch.utils.checkpoint`` checkpoints instead.

        Export would record that as a region without gradients. What a stage computes again is a matter of
        ``recompute``.

        Raises:
            LostBackwardError: its backward is not the derivative of its forward.
        """
        if function is CheckpointFunction:
            checkpointed, _, *inputs = args
            return checkpointed(*inputs)
        of_torch = function.__module__.split(".")[0] == "torch"
        if not of_torch and not self._allow_derivative and function not in self._checked:
            self._checked.add(function)
            if not _is_derivative(function, apply, args):
                raise LostBackwardError(function)
        return apply(*args, **kwargs)


def _is_derivative(function: Any, apply: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether both give the same gradients for random arguments; False if either cannot be run on them."""

    def compare() -> bool:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            inputs = [_sample(argument) for argument in args]
            own = _gradients(apply, inputs)
            torch.manual_seed(0)
            derived = _gradients(lambda *values: _run_forward(function, values), inputs)
            return all(map(_are_close, own, derived))

    try:
        with ThreadPoolExecutor(1) as pool:  # the modes in which torch.export traces are of its own thread
            return pool.submit(compare).result()
    except Exception:  # whatever a Function raises on values that it was not written for
        return False


def _run_forward(function: Any, values: tuple[Any, ...]) -> Any:
    """The forward alone, so that autograd differentiates it."""
    if function.setup_context is not torch.autograd.Function.setup_context:
        return function.forward(*values)
    return function.forward(FunctionCtx(), *values)


def _sample(argument: Any) -> Any:
    """A tensor with values in the place of one without."""
    if not isinstance(argument, Tensor):
        return argument
    if argument.numel() > _LARGEST:
        raise ValueError("too large to be tried")
    if not argument.is_floating_point():
        return torch.zeros(argument.shape, dtype=argument.dtype)
    return torch.randn(argument.shape, dtype=torch.float64).requires_grad_(argument.requires_grad)


def _gradients(run: Callable[..., Any], inputs: list[Any]) -> list[Tensor | None]:
    """The gradients of the inputs for random gradients of the outputs."""
    wanted = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
    outputs = [each for each in pytree.tree_leaves(run(*inputs)) if isinstance(each, Tensor) and each.requires_grad]
    if not outputs or not wanted:
        return [None] * len(wanted)
    weights = [torch.linspace(-1, 1, each.numel(), dtype=each.dtype).reshape(each.shape) for each in outputs]
    return list(torch.autograd.grad(outputs, wanted, weights, allow_unused=True))


def _are_close(own: Tensor | None, derived: Tensor | None) -> bool:
    if own is None or derived is None:
        return own is derived
    return torch.allclose(own, derived, rtol=_TOLERANCE, atol=_TOLERANCE * float(own.abs().max()) + 1e-12)
