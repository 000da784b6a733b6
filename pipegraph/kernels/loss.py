"""The loss of the last stage: what is refused as a loss, and what a loss function holds."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels import internals
from pipegraph.kernels.interface import Loss

CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
"""The containers that can be changed in place, and put back."""

_LEAVES = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.BuiltinFunctionType)


def scalar_loss(loss: Loss | None, outputs: tuple[Tensor, ...], target: Any) -> Tensor:
    """Return the loss, a tensor without dimensions.

    Raises:
        PipegraphError: there is no loss function, or its result is not such a tensor, or has no gradient.
    """
    if loss is None:
        raise PipegraphError("a loss was asked of a stage that has none: give Pipeline a loss_fn.")
    value = loss(outputs, target)
    needs_gradient = torch.is_grad_enabled() and any(map(requires_grad, outputs))
    if needs_gradient and isinstance(value, Tensor) and not value.requires_grad:
        raise PipegraphError(
            "loss_fn returned a tensor without a gradient, so nothing would be trained.\n"
            "Try: compute it from the output with tensor operations, without detach() or no_grad."
        )
    if not isinstance(value, Tensor) or value.dim() != 0:
        what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise PipegraphError(f"loss_fn(output, target) returned {what}; a step needs one number: take its mean.")
    return value


def check_gradients(outputs: tuple[Any, ...], has_gradient: tuple[bool, ...]) -> None:
    """Raise PipegraphError if an output needs a gradient and `has_gradient` says that none arrives."""
    for position, (output, arrives) in enumerate(zip(outputs, has_gradient, strict=False)):
        if not arrives and requires_grad(output):
            raise PipegraphError(
                f"output {position} of the stage needs a gradient, and pipeline.json says that none comes back "
                f"(requires_grad false): what made it would not be trained. Were its parameters frozen when the "
                f"model was split? Freeze them, or split the model again with them trainable."
            )


def requires_grad(output: Any) -> bool:
    """Return whether a gradient can reach an output."""
    return isinstance(output, Tensor) and output.requires_grad


def objects_held_by(loss: Loss | None) -> list[Any]:
    """Return the modules, tensors, containers and other objects that a loss function reads.

    Followed are closures, globals, default arguments, `functools.partial`, the items of containers, the attributes of
    modules, and of other objects those attributes whose names appear in the code that reads them.
    """
    objects: dict[int, Any] = {}
    names: set[str] = set()
    waiting = [loss]
    while waiting:
        value = waiting.pop()
        of_torch = type(value).__module__.startswith("torch.") and not isinstance(value, (nn.Module, Tensor))
        if id(value) not in objects and not of_torch and not isinstance(value, _LEAVES):
            objects[id(value)] = value
            waiting += _read_by(value, names)
    return list(objects.values())


def _read_by(value: Any, names: set[str]) -> Iterable[Any]:
    """Return what an object holds. `names` are the global names and attributes in all code so far; code adds to it."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if type(value) in CONTAINERS:
        return value.values()
    if isinstance(value, nn.Module):
        return (*internals.children(value).values(), *internals.attributes(value).values())
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        return (value.__self__, *_read_by(value.__func__, names))
    if isinstance(value, types.FunctionType):
        return _read_by_function(value, names)
    if isinstance(value, Tensor):
        return ()
    called = vars(type(value)).get("__call__")
    read = [*_read_by(called, names)] if isinstance(called, types.FunctionType) else []
    attributes = getattr(value, "__dict__", {})
    return [*read, *(item for name, item in attributes.items() if name in names)]


def _read_by_function(function: types.FunctionType, names: set[str]) -> list[Any]:
    if str(function.__module__).startswith("torch."):
        return []
    own_names = set(_names_in(function.__code__))
    names |= own_names
    items = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            items.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return items + [item for name, item in function.__globals__.items() if name in own_names]


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
