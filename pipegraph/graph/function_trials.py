"""What a ``torch.autograd.Function`` does, found by running it with random values, forward and backward.

It is run in another thread, in which no mode of an export is active, on small values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from pipegraph.torch_private.export import apply_function
from pipegraph.torch_private.fake_tensors import TorchDispatchMode
from pipegraph.torch_private.pytrees import pytree
from pipegraph.torch_private.symbolic_shapes import number_of
from pipegraph.torch_private.tensors import version_of

_TOLERANCE: Final = 1e-4
_SMALL: Final = 64  # the largest dimension of the arguments on which a Function is tried first
_LARGEST: Final = 2**26  # elements of an argument on which it is tried
_SCALES: Final = (1.0, 30.0)  # of values: some Functions cut a gradient off if its value is large
GRADIENT_SCALES: Final = (1.0, 1e3)
"""The scales of the gradients that arrive: some Functions cut a large one off."""


class UnwritableFunctionError(Exception):
    """The backward of a Function is not the derivative of its forward, and a graph cannot have a call of it."""


Samples = Callable[[float], list[Any]]
"""A scale → arguments with random values."""


@dataclass(frozen=True)
class Trial:
    """What a Function does.

    Attributes:
        is_derivative: whether its backward is the derivative of its forward.
        returns_tensors: whether it returns tensors alone.
        results: how many, in a tuple; None if it returns a tensor.
        draws: whether it draws random numbers.
        writes: whether it writes into its arguments.
    """

    is_derivative: bool
    returns_tensors: bool
    results: int | None
    draws: bool
    writes: bool


_trials: dict[Hashable, Trial] = {}


def trial_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trial:
    """What a Function does with arguments of these kinds, whether they need gradients or not.

    Raises:
        UnwritableFunctionError: it runs on no values.
    """
    key = function, *map(_kind, args), repr(kwargs)
    if key not in _trials:
        shapes = [tuple(map(_number, value.shape)) if isinstance(value, Tensor) else () for value in args]
        has_derivative = partial(_has_derivative, function, kwargs)

        def attempt(samples: Samples) -> Trial:
            values = samples(1.0)
            versions = [version_of(value) for value in values if isinstance(value, Tensor)]
            with torch.no_grad(), DrawsFixed() as draws:  # autograd lets nothing write into a leaf
                results = apply_function(function, *values, **kwargs)
            writes = versions != [version_of(value) for value in values if isinstance(value, Tensor)]
            leaves = results if isinstance(results, tuple) else [results]
            return Trial(
                is_derivative=not writes and all(has_derivative(samples(scale)) for scale in _SCALES),
                returns_tensors=bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves),
                results=len(results) if isinstance(results, tuple) else None,
                draws=draws.any,
                writes=writes,
            )

        _trials[key] = run_on_samples(function, args, shapes, attempt)
    return _trials[key]


def is_same(function: type, written: type, args: tuple[Any, ...]) -> bool:
    """Return whether two Functions give the same results and gradients; True if the first runs on no values."""

    def run(cls: type, values: list[Any]) -> list[Tensor | None]:
        with DrawsFixed():
            results = apply_function(cls, *values)
            of_scales = [gradients(results, values, scale=gradient_scale) for gradient_scale in GRADIENT_SCALES]
            return [*pytree.tree_leaves(results), *chain.from_iterable(of_scales)]

    def compare(samples: Samples) -> bool:
        for scale in _SCALES:
            values = samples(scale)
            expected = run(function, values)
            try:
                actual = run(written, values)
            except Exception:  # whatever the written source raises
                return False
            if len(actual) != len(expected) or not all(map(are_close, actual, expected)):
                return False
        return True

    shapes = [tuple(value.shape) if isinstance(value, Tensor) else () for value in args]
    try:
        return bool(run_on_samples(function, args, shapes, compare))
    except UnwritableFunctionError:
        return True


def run_on_samples(
    function: Any,
    args: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    run: Callable[[Samples], Any],
) -> Any:
    """Call ``run`` with a function that returns arguments with random values, on a scale.

    No dimension is larger than a limit, so that the run takes no time to speak of. If the Function cannot be run on
    such values, it is tried at its real sizes, in its real dtype, and with zeros for whole numbers.

    Raises:
        UnwritableFunctionError: it runs on no values.
    """
    failures: list[Exception] = []
    for dtype, are_random, limit in product((torch.float64, None), (True, False), (_SMALL, math.inf)):
        limited = [[int(min(size, limit)) for size in shape] for shape in shapes]

        def samples(scale: float) -> list[Any]:
            return [
                _sample(value, shape, dtype, scale, are_random)  # noqa: B023
                for value, shape in zip(args, limited, strict=True)  # noqa: B023
            ]

        try:
            with ThreadPoolExecutor(1) as pool, torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return pool.submit(run, samples).result()
        except Exception as error:  # whatever a Function raises on values that it was not written for
            failures.append(error)
    raise UnwritableFunctionError(
        f"{function.__qualname__} could not be run on random values on the CPU "
        f"({type(failures[0]).__name__}: {failures[0]})"
    )


def _sample(argument: Any, shape: Sequence[int], dtype: torch.dtype | None, scale: float, are_random: bool) -> Any:
    """A tensor with values in the place of one without; a number for a dynamic size."""
    if isinstance(argument, (tuple, list)):
        return type(argument)(map(_number, argument))
    if not isinstance(argument, Tensor):
        return _number(argument)
    if math.prod(shape) > _LARGEST:
        raise ValueError(f"an argument has {math.prod(shape):,} elements")
    if is_differentiable(argument):
        wide = torch.complex128 if dtype is not None and argument.is_complex() else dtype
        return (torch.randn(*shape, dtype=wide or argument.dtype) * scale).requires_grad_()
    return (torch.rand(*shape) < are_random / 2).to(argument.dtype)


def _kind(argument: Any) -> Hashable:
    """What two arguments have alike on which a Function does the same."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.dim()
    return type(argument), "a size" if isinstance(argument, torch.SymInt) else repr(argument)


def _number(value: Any) -> Any:
    """An argument; for a dynamic size the number of the example."""
    return number_of(value) if isinstance(value, torch.SymInt) else value


def _has_derivative(function: Any, kwargs: dict[str, Any], values: list[Any]) -> bool:
    """Return whether the gradients of a Function are those that autograd finds of its forward; False if it has none."""

    def run_forward(*values: Any) -> Any:
        if function.setup_context is not torch.autograd.Function.setup_context:
            return function.forward(*values, **kwargs)
        context = FunctionCtx()
        context.needs_input_grad = tuple(isinstance(value, Tensor) and value.requires_grad for value in values)  # type: ignore[attr-defined]
        return function.forward(context, *values, **kwargs)

    try:
        with DrawsFixed():
            results, derived_results = apply_function(function, *values, **kwargs), run_forward(*values)
            for scale in GRADIENT_SCALES:
                pair = (gradients(outputs, values, scale=scale) for outputs in (results, derived_results))
                if not all(map(are_close, *pair)):
                    return False
    except Exception:  # whatever a forward does not do under autograd, or a backward raises
        return False
    return True


def gradients(
    results: Any, values: Sequence[Any], arriving: Sequence[Tensor] | None = None, scale: float = 1.0
) -> list[Tensor | None]:
    """The gradients of arguments, for gradients of the results; made-up ones on a scale if none are given."""
    leaves = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    outputs = [result for result in pytree.tree_leaves(results) if isinstance(result, Tensor) and result.requires_grad]
    if not outputs or not leaves:
        return [None] * len(leaves)
    if arriving is None:
        arriving = [arriving_gradient(output, scale) for output in outputs]
    return list(torch.autograd.grad(outputs, leaves, arriving, allow_unused=True, retain_graph=True))


def arriving_gradient(output: Tensor, scale: float = 1.0) -> Tensor:
    """A gradient of a result that differs from element to element."""
    return torch.linspace(-scale, 1.5 * scale, output.numel(), dtype=output.dtype).reshape(output.shape)


def is_differentiable(value: Any) -> bool:
    """Return whether a value is a tensor that may have a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def are_close(first: Tensor | None, second: Tensor | None) -> bool:
    """Return whether two gradients, or results, are equal but for rounding."""
    if first is None or second is None:
        return first is second
    if first.shape != second.shape:
        return False
    if not is_differentiable(first):
        return torch.equal(first, second)
    largest = float(first.detach().abs().nan_to_num(0, 0, 0).max()) if first.numel() else 0.0
    return torch.allclose(first, second, rtol=_TOLERANCE, atol=_TOLERANCE * largest + 1e-12, equal_nan=True)


class DrawsFixed(TorchDispatchMode):
    """Lets every random number be 0.5, so that two runs draw the same.

    Attributes:
        any: whether there was one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        self.any = True
        return pytree.tree_map(lambda value: value.fill_(0.5) if isinstance(value, Tensor) else value, result)
