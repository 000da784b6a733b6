"""``torch.export`` in training or evaluation mode, which leaves the model as it was."""

from __future__ import annotations

import inspect
import io
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from functools import partial
from itertools import product
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple, TextIO

import torch
import torch.utils.checkpoint
from torch import nn
from torch.export import ExportedProgram

from pipegraph.arguments import argument
from pipegraph.errors import CaptureError, current_user_line, user_line
from pipegraph.graph.calls import ArgumentPlace, ResultPlace
from pipegraph.graph.captured import CHECKPOINTED, plain_containers
from pipegraph.graph.export.function_calls import CustomFunctions, HelperCalls, LostBackwardError
from pipegraph.graph.export.isolation import fake_parameters, not_logged, refusals_not_logged
from pipegraph.graph.internals import (
    autograd_functions_wrapped,
    call_name,
    current_call,
    fixed_sizes_seen,
    lstm_states_in_their_shapes,
    module_calls_wrapped,
    pytree,
    traced_node,
)
from pipegraph.graph.symbolic_size import InputDimension

# Arguments whose values are recorded.
_PLAIN = (bool, int, float, str, type(None))


class Exported(NamedTuple):
    """An exported program.

    Attributes:
        program: of ``torch.export``.
        mode: in which each module was.
        fixed: the dimensions of inputs that were not let vary; None if none was let.
        lines: a size that the model fixed, as torch names it → the line of the model's source.
        obstacle: why no dimension was let vary.
        computed: a dimension that had to be fixed → the line that computes from it what a stage cannot express.
    """

    program: ExportedProgram
    mode: Mapping[nn.Module, bool]
    fixed: frozenset[InputDimension] | None
    lines: Mapping[str, str] = MappingProxyType({})
    obstacle: str = ""
    computed: Mapping[InputDimension, str] = MappingProxyType({})


def export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fixed: frozenset[InputDimension] | None = frozenset(),
    *,
    allow_derivative: bool = False,
) -> Exported:
    """Export in training mode, or in the first other mode that works, with sizes that may vary if that works.

    Raises:
        CaptureError: no mode works, or a backward would be lost that is not the derivative of its forward and
            ``allow_derivative`` does not say to take that; names the line of the model's own source.
    """
    modules = list(model.modules())
    own_modes = {module: module.training for module in modules}
    modes = [dict.fromkeys(modules, True), own_modes, dict.fromkeys(modules, False)]
    first_error: Exception | None = None
    obstacle = ""
    for mode, tried in product(modes, dict.fromkeys((fixed, None))):
        lines: dict[str, str] = {}
        try:
            with fixed_sizes_seen(lambda size, value, lines=lines: lines.setdefault(size, current_user_line())):  # type: ignore[misc]
                program = export_in(mode, model, args, kwargs, fixed=tried, allow_derivative=allow_derivative)
        except LostBackwardError as error:
            raise CaptureError(_lost_backward(model, error)) from error
        except Exception as error:
            if tried is None:  # otherwise the reason is the same, or it is that sizes vary
                first_error = first_error or error
            else:
                obstacle = obstacle or ", at ".join(filter(None, (_summary(error), user_line(error))))
            continue
        if first_error is not None:
            warnings.warn(
                f"{type(model).__name__} cannot be traced in training mode ({_summary(first_error)}); it was captured "
                "in evaluation mode, without the dropout inside attention.",
                stacklevel=3,
            )
        return Exported(program, mode, tried, lines, obstacle if tried is None else "")
    assert first_error is not None
    raise CaptureError(_explanation(model, first_error)) from first_error


def export_in(
    mode: Mapping[nn.Module, bool],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None = None,
    *,
    fixed: frozenset[InputDimension] | None = None,
    allow_derivative: bool = True,
) -> ExportedProgram:
    """Export with each module in the mode that ``mode`` gives it (True: training), as it is after ``model.to(dtype)``.

    The sizes of the inputs may vary, but for those in ``fixed`` and those that the model fixes; None fixes all.

    Raises what export raises.
    """
    with (
        record_calls(model),
        lstm_states_in_their_shapes(),
        autograd_functions_wrapped(CustomFunctions(allow_derivative).apply),
        _modes(mode),
        fake_parameters(model, args, kwargs, dtype) as (fake_args, fake_kwargs),
        _graphs_not_shown(),
        warnings.catch_warnings(),
    ):
        # The second list of weights of an nn.LSTM follows the fake ones, and goes back with them.
        warnings.filterwarnings("ignore", r"The tensor attributes? self\.\S*_flat_weights")
        return torch.export.export(
            model,
            fake_args,
            fake_kwargs,
            dynamic_shapes=None if fixed is None else _varying_sizes(model, fake_args, fake_kwargs, fixed),
            strict=False,
        )


def _varying_sizes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], fixed: frozenset[InputDimension]
) -> Any:
    """The ``dynamic_shapes`` with which ``torch.export`` lets each size vary that neither the model nor ``fixed``
    fixes."""
    shapes = torch.export.ShapesCollection()
    for position, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
        if isinstance(leaf, torch.Tensor):
            # Of a size of 1 torch.export cannot tell whether it is broadcast.
            is_fixed = ((position, dim) in fixed or size < 2 for dim, size in enumerate(leaf.shape))
            shapes[leaf] = tuple(torch.export.Dim.STATIC if each else torch.export.Dim.AUTO for each in is_fixed)
    return shapes.dynamic_shapes(model, args, kwargs)


class _WithoutGraphs(io.TextIOBase):
    """A stream that passes on all but the graphs that torch prints."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        is_graph = "def forward(self" in text and "torch.ops.aten" in text
        return len(text) if is_graph else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def _graphs_not_shown() -> Iterator[None]:
    """Leave out what torch prints when an export fails: the whole graph, for each attempt. The error says the line."""
    shapes = not_logged("torch.fx.experimental.symbolic_shapes", "Unable to find user code")
    with shapes, refusals_not_logged(), redirect_stderr(_WithoutGraphs(sys.stderr)):
        yield


@contextmanager
def _modes(mode: Mapping[nn.Module, bool]) -> Iterator[None]:
    before = {module: module.training for module in mode}
    for module, training in mode.items():
        module.training = training
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _lost_backward(model: nn.Module, error: LostBackwardError) -> str:
    where = user_line(error)
    at = f"\n  at {where}" if where else ""
    return (
        f"{type(model).__name__} cannot be captured: {error}, and torch.export drops it.{at}\n"
        "Try: torch.library.custom_op with register_autograd, which keeps the backward, or "
        f"{argument('allow_derivative', True)}, which takes the derivative of the forward."
    )


def _explanation(model: nn.Module, error: Exception) -> str:
    """The message of a `CaptureError`: the problem, the line of the user's source, and advice."""
    where = user_line(error)
    advice = (
        "model(*example_inputs) in Python. If that fails too, mend the inputs or the model; if not, "
        f"{'the line above' if where else 'something in it'} is Python that torch.export cannot follow"
    )
    if _depends_on_values(error):
        advice = "for a branch, compute both sides and choose with torch.where; for a number, pass it as an argument"
    at = f"\n  at {where}" if where else ""
    return f"{type(model).__name__} cannot be captured: {_summary(error)}.{at}\nTry: {advice}."


def _summary(error: Exception) -> str:
    """The problem, in one line."""
    if _depends_on_values(error):
        return "what it does depends on the values of a tensor, which are not known while it is traced"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _depends_on_values(error: Exception) -> bool:
    return "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__


def record_calls(model: nn.Module) -> AbstractContextManager[None]:
    """Mark the arguments and results of every call of a module, or of a function beside one, that ``torch.export``
    traces inside."""
    helpers = HelperCalls(model)
    return module_calls_wrapped(partial(_run_recorded, helpers), helpers.name)


def _run_recorded(
    helpers: HelperCalls,
    tracer: Any,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    call = call_name(current_call(tracer))
    arguments = list(_arguments(module, args, kwargs))
    _mark(tracer, "argument_of", call, _argument_places(arguments))
    result = forward(*args, **kwargs)
    helpers.end(tracer)
    if _is_checkpointed(inspect.currentframe()):
        _mark(tracer, CHECKPOINTED, call, ((tensor, True) for tensor in _tensors(result)))
    plain = tuple((each.name, _plain(each)) for each in arguments)
    _mark(tracer, "result_of", call, _result_places(result, plain))
    return result


def _is_checkpointed(frame: FrameType | None) -> bool:
    """Return whether the call of a module that runs in a frame was made by ``torch.utils.checkpoint``, not by the call
    of another module that was."""
    if frame is None:  # an interpreter without frames
        return False
    own, caller = frame.f_code, frame.f_back
    while caller is not None and caller.f_code is not own:
        if caller.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        caller = caller.f_back
    return False


def _mark(tracer: Any, key: str, call: str, values: Iterator[tuple[torch.Tensor, Any]]) -> None:
    for tensor, place in values:
        node = traced_node(tracer, tensor)
        if node is not None:
            places = node.meta.setdefault(key, {})
            first = places.setdefault(call, place)
            if isinstance(first, ArgumentPlace):
                places[call] = first.joined(place)


class _Argument(NamedTuple):
    name: str
    value: Any
    is_variadic: bool  # a tuple of positional arguments, *args


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_Argument]:
    """The arguments of a call, in the order of the parameters of ``forward``."""
    try:
        signature = inspect.signature(module.forward)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        named = value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        for key, each in named.items():
            yield _Argument(key, each, kind is inspect.Parameter.VAR_POSITIONAL)


def _plain(argument: _Argument) -> object:
    """What a call keeps of an argument, as `ResultPlace` has it."""
    value = argument.value
    if isinstance(value, tuple) and value and not argument.is_variadic:
        return (...,) * len(value) if all(isinstance(part, torch.Tensor) for part in value) else ...
    return value if isinstance(value, _PLAIN) else ...


def _argument_places(arguments: Iterable[_Argument]) -> Iterator[tuple[torch.Tensor, ArgumentPlace]]:
    order = 0
    for name, value, is_variadic in arguments:
        for index, tensor in enumerate(_tensors(value)):
            is_whole = tensor is value and not is_variadic
            part = None if is_whole or is_variadic else (name, index)
            yield tensor, ArgumentPlace(order, name if is_whole else None, part_of=part)
            order += 1


def _result_places(
    result: Any, arguments: tuple[tuple[str, object], ...]
) -> Iterator[tuple[torch.Tensor, ResultPlace]]:
    parts = list(result) if isinstance(result, (tuple, list)) else [result]
    order = 0
    for index, part in enumerate(parts):
        for tensor in _tensors(part):
            yield tensor, ResultPlace(order, index if tensor is part else None, len(parts), arguments)
            order += 1


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(plain_containers(value)) if isinstance(leaf, torch.Tensor)]
