"""When do two module calls run the same code? Where their signatures are equal: hashable, and cautious.

What cannot be compared (an object that a module holds) is equal to itself alone, so that a layer which could differ is
compiled on its own: slower to start, never wrong.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.kernels.sharded import is_layout, is_style, layout, local

ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size)
_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)
_STATE = frozenset({"_parameters", "_buffers", "_modules"})


class _Identity:
    """An object that is equal to itself alone. Holding it keeps its id from being given to another one."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.held is self.held


def tensor_signature(tensor: Tensor) -> tuple[Any, ...]:
    """Everything that a graph is made for."""
    own = local(tensor)
    return (layout(tensor), tuple(own.shape), own.stride(), own.dtype, own.device, tensor.requires_grad)


@dataclass
class _Walk:
    """What one signature has come across: an object or a tensor that comes again is the number that it got.

    `held` are the modules, lists, dicts and sets that a function reads. Without such a list modules are no part of what
    is compared, nor is what a function reads from its globals and its object.
    """

    numbers: dict[int, int] = field(default_factory=dict)
    tensors: dict[int, int] = field(default_factory=dict)
    held: list[Any] | None = None


def module_signature(module: nn.Module) -> tuple[Any, ...]:
    """Classes, attributes and modes of a module and its children, and which of its tensors are one."""
    return _module(module, _Walk())


def value_signature(value: Any) -> Any:
    """Of an attribute or an argument that is no tensor."""
    return _value(value, _Walk())


def loss_signature(loss: Any) -> tuple[Any, list[Any]]:
    """Of a function that is no part of a module, with what it reads from outside; the modules among that, and what
    else can be changed."""
    held: list[Any] = []
    return _value(loss, _Walk(held=held)), held


def _module(module: nn.Module, walk: _Walk) -> tuple[Any, ...]:
    if id(module) in walk.numbers:
        return ("again", walk.numbers[id(module)])
    walk.numbers[id(module)] = len(walk.numbers)
    attributes = tuple(
        (name, _value(_hooks(module, name) if name in _HOOKS else item, walk))
        for name, item in vars(module).items()
        if name not in _STATE
    )
    tensors = tuple(
        (name, None if tensor is None else walk.tensors.setdefault(id(tensor), len(walk.tensors)))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    )
    children = tuple((name, None if child is None else _module(child, walk)) for name, child in module._modules.items())
    return (type(module), attributes, tensors, children)


def _hooks(module: nn.Module, name: str) -> Any:
    """A module's hooks, numbered among themselves: no two of the process are registered under one number."""
    numbers = sorted({number for each in _HOOKS for number in getattr(module, each, None) or ()})
    return tuple((numbers.index(number), hook) for number, hook in (getattr(module, name) or {}).items())


def _value(value: Any, walk: _Walk) -> Any:
    if isinstance(value, ATOMS) or is_layout(value):
        return (type(value), value)
    if is_style(value):
        return (type(value), *((name, _value(item, walk)) for name, item in vars(value).items()))
    if id(value) in walk.numbers:
        return ("again", walk.numbers[id(value)])
    if type(value) in (tuple, list, set, frozenset) or _is_mapping(value):
        return _container(value, walk)
    if isinstance(value, nn.Module) and walk.held is not None:
        walk.held.append(value)
        return (_Identity(value), _module(value, walk))
    if isinstance(value, functools.partial):
        return (functools.partial, *(_value(part, walk) for part in (value.func, value.args, value.keywords)))
    if isinstance(value, types.MethodType):
        function, owner = value.__func__, value.__self__
        return (types.MethodType, function, _value(owner, walk), _read(function, walk, owner))
    if isinstance(value, types.FunctionType):
        walk.numbers[id(value)] = len(walk.numbers)  # for one that calls itself
        cells = tuple(_cell(cell, walk) for cell in value.__closure__ or ())
        given = _value(value.__defaults__, walk), _value(value.__kwdefaults__, walk)
        return (value.__code__, cells, *given, _read(value, walk))
    if walk.held is not None and callable(value):
        walk.numbers[id(value)] = len(walk.numbers)
        return (_Identity(value), _read(type(value).__call__, walk, value))
    return _Identity(value)


def _read(function: Any, walk: _Walk, owner: Any = None) -> Any:
    """What a function reads from its globals, and from the object that it is a method of, by the names in its code."""
    if walk.held is None or not isinstance(function, types.FunctionType):
        return ()
    if str(function.__module__).startswith("torch."):
        return ()
    own, code = getattr(owner, "__dict__", {}), function.__code__
    read = [(name, function.__globals__[name]) for name in _globals(code) if name in function.__globals__]
    read += [(name, own[name]) for name in code.co_names if name in own]
    return tuple((name, _value(item, walk)) for name, item in read)


@functools.lru_cache(maxsize=1024)
def _globals(code: types.CodeType) -> tuple[str, ...]:
    inner = (name for each in code.co_consts if isinstance(each, types.CodeType) for name in _globals(each))
    own = (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    return tuple(dict.fromkeys((*own, *inner)))


def _container(value: Any, walk: _Walk) -> Any:
    if walk.held is not None and type(value) not in (tuple, frozenset):
        walk.held.append(value)
    walk.numbers[id(value)] = len(walk.numbers)  # for one that holds itself
    if _is_mapping(value):
        items: Any = tuple((key, _value(item, walk)) for key, item in value.items())
    else:
        items = (_value(item, walk) for item in value)
        items = tuple(items) if isinstance(value, (tuple, list)) else frozenset(items)
    del walk.numbers[id(value)]  # it may be no one's, and its id soon another's
    return (type(value), items)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections")


def _cell(cell: types.CellType, walk: _Walk) -> Any:
    try:
        return _value(cell.cell_contents, walk)
    except ValueError:  # not filled yet
        return "empty"
