"""When do two module calls run the same code? Where their signatures are equal: hashable, and cautious.

What cannot be compared (an object that a module holds) is equal to itself alone, so that a layer which could differ is
compiled on its own: slower to start, never wrong.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.kernels.sharded import is_layout, is_style, layout, local

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size)
_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)
_STATE = frozenset({"_parameters", "_buffers", "_modules"})


class _Same:
    """An object that is equal to itself alone. Holding it keeps its id from being given to another one."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.held is self.held


def tensor_signature(tensor: Tensor) -> tuple[Any, ...]:
    """Everything that a graph is made for."""
    own = local(tensor)
    return (layout(tensor), tuple(own.shape), own.stride(), own.dtype, own.device, tensor.requires_grad)


def module_signature(module: nn.Module) -> tuple[Any, ...]:
    """Classes, attributes and modes of a module and its children, and which of its tensors are one."""
    return _module(module, {}, {})


def value_signature(value: Any) -> Any:
    """Of an attribute or an argument that is no tensor."""
    return _value(value, {})


def _module(module: nn.Module, seen: dict[int, int], active: dict[int, int]) -> tuple[Any, ...]:
    if id(module) in active:
        return ("again", active[id(module)])
    active[id(module)] = len(active)
    attributes = tuple(
        (name, _value(_hooks(module, name) if name in _HOOKS else item, active))
        for name, item in vars(module).items()
        if name not in _STATE
    )
    tensors = tuple(
        (name, None if tensor is None else seen.setdefault(id(tensor), len(seen)))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    )
    children = tuple(
        (name, None if child is None else _module(child, seen, active)) for name, child in module._modules.items()
    )
    return (type(module), attributes, tensors, children)


def _hooks(module: nn.Module, name: str) -> Any:
    """A module's hooks, numbered among themselves: no two of the process are registered under one number."""
    numbers = sorted({number for each in _HOOKS for number in getattr(module, each, None) or ()})
    return tuple((numbers.index(number), hook) for number, hook in (getattr(module, name) or {}).items())


def _value(value: Any, active: dict[int, int]) -> Any:
    if isinstance(value, _ATOMS) or is_layout(value):
        return (type(value), value)
    if is_style(value):
        return (type(value), *((name, _value(item, active)) for name, item in vars(value).items()))
    if type(value) in (tuple, list):
        return (type(value), *(_value(item, active) for item in value))
    if type(value) in (set, frozenset):
        return (type(value), frozenset(_value(item, active) for item in value))
    if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        return (type(value), *((key, _value(item, active)) for key, item in value.items()))
    if isinstance(value, nn.Module) and id(value) in active:
        return ("again", active[id(value)])
    if isinstance(value, functools.partial):
        return (functools.partial, *(_value(part, active) for part in (value.func, value.args, value.keywords)))
    if isinstance(value, types.MethodType):
        return (types.MethodType, value.__func__, _value(value.__self__, active))
    if isinstance(value, types.FunctionType):
        cells = tuple(_cell(cell, active) for cell in value.__closure__ or ())
        return (value.__code__, cells, _value(value.__defaults__, active), _value(value.__kwdefaults__, active))
    return _Same(value)


def _cell(cell: types.CellType, active: dict[int, int]) -> Any:
    try:
        return _value(cell.cell_contents, active)
    except ValueError:  # not filled yet
        return "empty"
