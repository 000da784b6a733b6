"""Calls of a model's own functions: helpers in its files, and ``torch.autograd.Function``s with a backward."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import CodeType, FrameType
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from pipegraph.graph.calls import ArgumentPlace, ResultPlace
from pipegraph.graph.nodes import HELPER_MARK
from pipegraph.torch_private.export import symbolic_expression, traced_node
from pipegraph.torch_private.pytrees import pytree

_PLAIN = (torch.Tensor, bool, int, float, str, type(None), torch.SymInt, torch.dtype, torch.device)

_TOLERANCE = 1e-4
_SMALL = 64  # the largest dimension of the arguments on which a Function is tried first
_LARGEST = 2**26  # elements of an argument on which it is tried
_VARYING = 6  # a dynamic size, in such arguments


class HelperCalls:
    """Names the calls of helper functions, which are in the files of a model's modules, while the model is traced.

    Such a function takes tensors and numbers, and no modules. Each call gets a separate name, which replaces the name
    of the function in the stack traces of its operations: ``rotate_half()@3``.

    Args:
        model: the model that is traced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._files = {type(module).__module__ for module in model.modules()}
        self._count: Counter[str] = Counter()
        self._names: dict[FrameType, str] = {}  # of helpers, kept to mark what they return

    def name(self, tracer: Any, frame: FrameType) -> str:
        """The name of the call that a frame belongs to; the name of its function if that is not a helper.

        The parameters are read at the first operation that the call runs.
        """
        if frame in self._names:
            return self._names[frame]
        name = self._new_name(tracer, frame)
        if HELPER_MARK in name:
            self._names[frame] = name
        return name

    def end(self, tracer: Any) -> None:
        """Mark what the calls returned that were named since the last time."""
        for frame, name in self._names.items():
            _mark_results(tracer, frame, name)
        self._names.clear()

    def _new_name(self, tracer: Any, frame: FrameType) -> str:
        code = frame.f_code
        function = frame.f_globals.get(code.co_name)
        if frame.f_globals.get("__name__") not in self._files or not inspect.isfunction(function):
            return code.co_name
        names = [*inspect.signature(function).parameters]
        values = [frame.f_locals.get(name) for name in names]
        if function.__code__ is not code or not all(map(_is_plain, values)):
            return code.co_name
        self._count[code.co_name] += 1
        call = f"{code.co_name}{HELPER_MARK}{self._count[code.co_name]}"
        for order, (name, value) in enumerate(zip(names, values, strict=True)):
            node = traced_node(tracer, value) if isinstance(value, torch.Tensor) else None
            if node is not None:
                places = node.meta.setdefault("argument_of", {})
                place = ArgumentPlace(order, name)
                places[call] = places[call].joined(place) if call in places else place
        return call


def _mark_results(tracer: Any, frame: FrameType, call: str) -> None:
    names = _returned(frame.f_code).get(frame.f_lineno, ())
    for index, name in enumerate(names):
        value = frame.f_locals.get(name)
        node = traced_node(tracer, value) if isinstance(value, torch.Tensor) else None
        if node is not None:
            node.meta.setdefault("result_of", {}).setdefault(call, ResultPlace(index, index, len(names)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(number, (bool, int, float)) for number in value)
    return isinstance(value, _PLAIN)


@cache
def _returned(code: CodeType) -> dict[int, tuple[str, ...]]:
    """The lines of a function's ``return a, b`` → the names; lines of other statements are left out."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return {}
    names: dict[int, tuple[str, ...]] = {}
    for line, elements in _returns(tree.body):
        if all(isinstance(expression, ast.Name) for expression in elements):
            names[line + code.co_firstlineno - 1] = tuple(name.id for name in elements if isinstance(name, ast.Name))
    return names


def _returns(body: Sequence[ast.stmt]) -> Iterator[tuple[int, list[ast.expr]]]:
    for tree in body:
        for node in ast.walk(tree):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                yield from ((line, node.value.elts) for line in range(node.lineno, (node.end_lineno or 0) + 1))


class LostBackwardError(Exception):
    """The backward of a Function is not the derivative of its forward, or could not be compared with it."""


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
        differentiated = torch.is_grad_enabled() and any(map(_requires_grad, args))
        if differentiated and not of_torch and not self._allow_derivative and function not in self._checked:
            _check_derivative(function, apply, args)
            self._checked.add(function)
        # Hooks of a checkpoint around it: torch.export takes what follows them to be without gradients.
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            return apply(*args, **kwargs)


def _requires_grad(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad


def _check_derivative(function: Any, apply: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Compare the gradients of both for random arguments.

    Their dimensions are those of the real arguments up to a limit, so that the comparison takes no time to speak of.
    If a Function cannot be run on such, it is tried at its real sizes.

    Raises:
        LostBackwardError: they differ, or one of them cannot be run.
    """

    def compare(limit: float) -> bool:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            inputs = [_sample(argument, limit) for argument in args]
            gradients = _gradients(apply, inputs)
            torch.manual_seed(0)
            derived = _gradients(lambda *values: _run_forward(function, values), inputs)
            return all(map(_are_close, gradients, derived))

    equal, failure = None, None
    for limit in (_SMALL, math.inf):
        try:
            with ThreadPoolExecutor(1) as pool:  # the modes of torch.export are active only in its thread
                equal = pool.submit(compare, limit).result()
            break
        except Exception as error:  # whatever a Function raises on values that it was not written for
            failure = error
    if equal is None:
        raise LostBackwardError(
            f"the backward of {function.__qualname__} could not be compared with the derivative of its forward on "
            f"random values in float64 on the CPU ({type(failure).__name__}: {failure})"
        )
    if not equal:
        raise LostBackwardError(f"the backward of {function.__qualname__} is not the derivative of its forward")


def _run_forward(function: Any, values: tuple[Any, ...]) -> Any:
    """The forward alone, so that autograd differentiates it."""
    if function.setup_context is not torch.autograd.Function.setup_context:
        return function.forward(*values)
    return function.forward(FunctionCtx(), *values)


def _sample(argument: Any, limit: float) -> Any:
    """A tensor with values in the place of one without, with no dimension larger than `limit`."""
    if not isinstance(argument, Tensor):
        return argument
    shape = [int(min(_number(size), limit)) for size in argument.shape]
    if math.prod(shape) > _LARGEST:
        raise ValueError(f"an argument has {math.prod(shape):,} elements")
    if not argument.is_floating_point():
        return torch.zeros(shape, dtype=argument.dtype)
    return torch.randn(shape, dtype=torch.float64).requires_grad_(argument.requires_grad)


def _number(size: int | torch.SymInt) -> int:
    """A size; for one that varies another number, because to ask for its own would fix it."""
    if isinstance(size, int):
        return size
    expression = symbolic_expression(size)
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(_VARYING))))


def _gradients(run: Callable[..., Any], inputs: list[Any]) -> list[Tensor | None]:
    """The gradients of the inputs for random gradients of the outputs."""
    differentiable_inputs = [tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.requires_grad]
    outputs = [leaf for leaf in pytree.tree_leaves(run(*inputs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs or not differentiable_inputs:
        return [None] * len(differentiable_inputs)
    weights = [torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape) for output in outputs]
    return list(torch.autograd.grad(outputs, differentiable_inputs, weights, allow_unused=True))


def _are_close(gradient: Tensor | None, derived: Tensor | None) -> bool:
    if gradient is None or derived is None:
        return gradient is derived
    return torch.allclose(gradient, derived, rtol=_TOLERANCE, atol=_TOLERANCE * float(gradient.abs().max()) + 1e-12)
