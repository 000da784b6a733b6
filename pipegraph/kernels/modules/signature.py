"""When do two module calls run the same code? If their signatures are equal. Signatures are hashable, and cautious.

An object that cannot be compared equals itself alone, so a layer that could differ is compiled on its own: slower to
start, never wrong.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.kernels import internals
from pipegraph.kernels.sharded import is_layout, is_style, layout, local

ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size)


class _Identity:
    """Equal to the signature of the same object alone. Holding the object keeps its id from being reused."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.held is self.held


@dataclass
class _Numbers:
    """The objects and tensors that one signature has met: an object that comes again is the number that it got."""

    objects: dict[int, int] = field(default_factory=dict)
    tensors: dict[int, int] = field(default_factory=dict)


def tensor_signature(tensor: Tensor) -> tuple[Any, ...]:
    """Everything about a tensor that a graph is made for."""
    own = local(tensor)
    return (layout(tensor), tuple(own.shape), own.stride(), own.dtype, own.device, tensor.requires_grad)


def module_signature(module: nn.Module) -> tuple[Any, ...]:
    """Classes, attributes, hooks and modes of a module and its children, and which of its tensors are one."""
    return _of_module(module, _Numbers())


def value_signature(value: Any) -> Any:
    """The signature of an attribute or an argument that is no tensor."""
    return _of_value(value, _Numbers())


def _of_module(module: nn.Module, numbers: _Numbers) -> tuple[Any, ...]:
    if id(module) in numbers.objects:
        return ("again", numbers.objects[id(module)])
    numbers.objects[id(module)] = len(numbers.objects)
    attributes = tuple((name, _of_value(item, numbers)) for name, item in internals.attributes(module).items())
    # Hooks are numbered among the module's own: no two of the process are registered under one number.
    registered = sorted(internals.hook_numbers(module))
    hooks = tuple(
        (name, tuple((registered.index(number), _of_value(hook, numbers)) for number, hook in held.items()))
        for name, held in internals.hook_dicts(module).items()
    )
    tensors = tuple(
        (name, None if tensor is None else numbers.tensors.setdefault(id(tensor), len(numbers.tensors)))
        for held in internals.tensor_dicts(module)
        for name, tensor in held.items()
    )
    children = tuple(
        (name, None if child is None else _of_module(child, numbers))
        for name, child in internals.children(module).items()
    )
    return (type(module), attributes, hooks, tensors, children)


def _of_value(value: Any, numbers: _Numbers) -> Any:
    if isinstance(value, ATOMS) or is_layout(value):
        return (type(value), value)
    if is_style(value):
        return (type(value), *((name, _of_value(item, numbers)) for name, item in vars(value).items()))
    if id(value) in numbers.objects:
        return ("again", numbers.objects[id(value)])
    if type(value) in (tuple, list, set, frozenset) or _is_mapping(value):
        return _of_container(value, numbers)
    if isinstance(value, functools.partial):
        return (functools.partial, *(_of_value(part, numbers) for part in (value.func, value.args, value.keywords)))
    if isinstance(value, types.MethodType):
        return (types.MethodType, value.__func__, _of_value(value.__self__, numbers))
    if isinstance(value, types.FunctionType):
        numbers.objects[id(value)] = len(numbers.objects)  # for a function that calls itself
        cells = tuple(_of_cell(cell, numbers) for cell in value.__closure__ or ())
        return (
            value.__code__,
            cells,
            *(_of_value(each, numbers) for each in (value.__defaults__, value.__kwdefaults__)),
        )
    return _Identity(value)


def _of_container(value: Any, numbers: _Numbers) -> Any:
    numbers.objects[id(value)] = len(numbers.objects)  # for a container that holds itself
    if _is_mapping(value):
        items: Any = tuple((key, _of_value(item, numbers)) for key, item in value.items())
    else:
        items = (_of_value(item, numbers) for item in value)
        items = tuple(items) if isinstance(value, (tuple, list)) else frozenset(items)
    del numbers.objects[id(value)]  # the container may be temporary, and its id soon another's
    return (type(value), items)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections")


def _of_cell(cell: types.CellType, numbers: _Numbers) -> Any:
    try:
        return _of_value(cell.cell_contents, numbers)
    except ValueError:  # not filled yet
        return "empty"
