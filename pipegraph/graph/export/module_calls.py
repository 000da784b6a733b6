"""The arguments and results of every call of a module while a model is exported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import nn

from pipegraph.errors import CaptureError
from pipegraph.graph.calls import ArgumentPlace, ResultPlace
from pipegraph.graph.captured import CHECKPOINTED, plain_containers
from pipegraph.graph.export.variables import VariableRecorder
from pipegraph.torch_private.export import call_name, current_call, module_calls_wrapped, traced_node
from pipegraph.torch_private.pytrees import pytree

# Arguments whose values are recorded.
_PLAIN = (bool, int, float, str, type(None))


def record_calls(model: nn.Module) -> AbstractContextManager[None]:
    """Mark the arguments and results of every call of a module that ``torch.export`` traces inside."""
    return module_calls_wrapped(partial(_run_recorded, model, VariableRecorder()))


def _run_recorded(
    model: nn.Module,
    variables: VariableRecorder,
    tracer: Any,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    call = call_name(current_call(tracer))
    if module is not model and variables.running_call == call:
        return forward(*args, **kwargs)  # no module of the model: a slice of a Sequential is made when it is called
    arguments = list(_arguments(module, args, kwargs))
    _mark(tracer, "argument_of", call, _argument_places(arguments))
    buffers = dict(module.named_buffers(recurse=False))
    with variables.recording(tracer, module, call):
        result = forward(*args, **kwargs)
    if module is not model:  # torch.export keeps what the outermost module assigns
        _write_assigned(module, buffers)
    if _is_checkpointed(inspect.currentframe()):
        _mark(tracer, CHECKPOINTED, call, ((tensor, True) for tensor in _tensors(result)))
    plain = tuple((argument.name, _plain(argument)) for argument in arguments)
    _mark(tracer, "result_of", call, _result_places(result, plain, len(args)))
    return _with_plain_dataclasses(result) if module is model else result


def _with_plain_dataclasses(result: Any) -> Any:
    """What the model returns with a dict for each dataclass that ``torch.export`` does not know. It has a dict for one
    that is registered, too."""

    def plain(leaf: Any) -> Any:
        return plain_containers(leaf) if is_dataclass(leaf) else leaf

    return pytree.tree_map(plain, result)


def _write_assigned(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Write what a ``forward`` assigned to the buffers of its module into them: ``torch.export`` drops
    ``self.mean = …`` of an inner module.

    Args:
        buffers: the buffers before the call.
    """
    for name, buffer in buffers.items():
        value = getattr(module, name, None)
        if value is buffer or not isinstance(value, torch.Tensor):
            continue
        if (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
            raise CaptureError(
                f"{type(module).__name__} assigns {value.dtype} of the shape {list(value.shape)} to its buffer {name}, "
                f"which is {buffer.dtype} of {list(buffer.shape)}.",
                "a buffer that has this shape and dtype from the beginning.",
            )
        with torch.no_grad():
            buffer.copy_(value)
        setattr(module, name, buffer)


def _is_checkpointed(frame: FrameType | None) -> bool:
    """Return whether the call of a module that runs in a frame was made by ``torch.utils.checkpoint``, not by the call
    of another module that was."""
    if frame is None:  # an interpreter without frames
        return False
    code, caller = frame.f_code, frame.f_back
    while caller is not None and caller.f_code is not code:
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
        for key, argument in named.items():
            yield _Argument(key, argument, kind is inspect.Parameter.VAR_POSITIONAL)


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
    result: Any, arguments: tuple[tuple[str, object], ...], positional: int
) -> Iterator[tuple[torch.Tensor, ResultPlace]]:
    count, form = len(result) if isinstance(result, (tuple, list)) else 1, _form(result)
    for order, (tensor, path) in enumerate(_with_paths(result, ())):
        index = 0 if path == () else path[0] if path is not None and len(path) == 1 else None
        yield tensor, ResultPlace(order, index, count, arguments, positional, path, form)


def _with_paths(value: Any, path: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, tuple[int, ...] | None]]:
    """The tensors in nested tuples, each with its indices; None for one that is deeper inside something else."""
    if isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from _with_paths(part, (*path, index))
    else:
        yield from ((tensor, path if tensor is value else None) for tensor in _tensors(value))


def _form(value: Any) -> object:
    if isinstance(value, (tuple, list)):
        return tuple(map(_form, value))
    return ... if isinstance(value, torch.Tensor) else None


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(plain_containers(value)) if isinstance(leaf, torch.Tensor)]
