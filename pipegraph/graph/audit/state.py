"""What a model keeps between calls outside of its parameters and buffers: attributes, containers, globals.

A snapshot has the plain values and the identity of the tensors that can be reached from the modules, and is compared
with one after a call.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from pipegraph.errors import is_user_file
from pipegraph.torch_private.tensors import storage_identity, version_of

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS: Final = (list, tuple, dict, OrderedDict, set, frozenset, deque)
_LONGEST: Final = 10_000
"""Items of a container; of a longer one, such as a vocabulary, the length alone is compared."""
_DEEPEST: Final = 6
_OF_MODULES: Final = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of each module that are compared apart."""


class Place(NamedTuple):
    """Where a value is.

    Attributes:
        name: ``layers.0.calls``, ``layers.0.seen[3]``, ``model.COUNT``.
        owner: the id of the object that holds it.
        attribute: its name there; "" for an item of a container.
        is_tensor: whether it is a tensor.
    """

    name: str
    owner: int
    attribute: str
    is_tensor: bool


class Snapshot:
    """What a model keeps, now.

    Attributes:
        values: of each place, by its name. Tensors are described by their identity.
        places: the same places.
        containers: the ids of all containers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[str, object] = {}
        self.places: dict[str, Place] = {}
        self.containers: set[int] = set()
        # Holds them, so that an id stays its own. Buffers may change.
        self._visited: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        for name, module in model.named_modules():
            self._add_module(name, module)
        for name, owner in _owners_of_globals(model).items():
            for variable, value in list(vars(owner).items()):
                if isinstance(value, (*_PLAIN, *_CONTAINERS)) and not variable.startswith("__"):
                    self._add(f"{name}.{variable}", value, id(owner), variable, _DEEPEST - 2)

    def changes(self, snapshot: Snapshot) -> list[Place]:
        """The places whose values differ in a later snapshot, in order."""
        names = dict.fromkeys([*self.values, *snapshot.values])
        changed = [name for name in names if self.values.get(name, _ABSENT) != snapshot.values.get(name, _ABSENT)]
        return [snapshot.places.get(name) or self.places[name] for name in changed]

    def _add_module(self, name: str, module: nn.Module) -> None:
        self._visited[id(module)] = module
        prefix = f"{name}." if name else ""
        for kind in ("_parameters", "_modules"):
            for key, value in vars(module)[kind].items():
                is_tensor = isinstance(value, Tensor)
                described = (id(value), storage_identity(value)) if isinstance(value, Tensor) else id(value)
                self._add_place(Place(f"{prefix}{key}", id(module), key, is_tensor), described)
        for key in vars(module)["_buffers"]:
            self._add_place(Place(f"{prefix}{key}", id(module), key, True), "a buffer")
        for key, value in vars(module).items():
            if key not in _OF_MODULES:
                self._add(f"{prefix}{key}", value, id(module), key, 0)

    def _add(self, name: str, value: Any, owner: int, attribute: str, depth: int) -> None:
        if isinstance(value, Tensor) and id(value) not in self._visited:
            self._add_place(Place(name, owner, attribute, True), (id(value), version_of(value)))
            self._visited[id(value)] = value
        elif isinstance(value, _PLAIN):
            self._add_place(Place(name, owner, attribute, False), (type(value).__name__, value))
        elif isinstance(value, random.Random):
            self._add_place(Place(name, owner, attribute, False), value.getstate())
        elif isinstance(value, torch.Generator):
            self._add_place(Place(name, owner, attribute, False), bytes(value.get_state().tolist()))
        elif depth < _DEEPEST and id(value) not in self._visited:
            self._visited[id(value)] = value
            if isinstance(value, _CONTAINERS):
                self._add_items(name, value, depth)
            elif isinstance(value, FunctionType):
                self._add_closure(name, value, depth)
            elif _is_object(value):
                for key, item in vars(value).items():
                    self._add(f"{name}.{key}", item, id(value), key, depth + 1)

    def _add_closure(self, name: str, function: FunctionType, depth: int) -> None:
        """Add the variables of the functions around a function, which it may assign: ``nonlocal count``."""
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # it has no value yet
                self._add(f"{name}: {variable}", cell.cell_contents, id(cell), variable, depth + 1)

    def _add_place(self, place: Place, value: object) -> None:
        self.values[place.name], self.places[place.name] = value, place

    def _add_items(self, name: str, container: Any, depth: int) -> None:
        self.containers.add(id(container))
        self._add_place(Place(f"len({name})", id(container), "", False), len(container))
        if len(container) > _LONGEST:
            return
        if isinstance(container, (set, frozenset)):
            plain = sorted(repr(item) for item in container if isinstance(item, _PLAIN))
            self._add_place(Place(name, id(container), "", False), plain)
            return
        items = container.items() if isinstance(container, Mapping) else enumerate(container)
        for key, item in list(items):
            self._add(f"{name}[{key!r}]", item, id(container), "", depth + 1)


_ABSENT: Final = object()


def _is_object(value: object) -> bool:
    """Whether a value is an object of a class in Python that is neither a module nor a function."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (nn.Module, type, ModuleType))
        and not callable(value)
        and type(value).__module__.partition(".")[0] not in ("torch", "pipegraph")
    )


def _owners_of_globals(model: nn.Module) -> dict[str, Any]:
    """The Python modules and the classes of the user's that the modules of a model are from, by name."""
    owners: dict[str, Any] = {}
    for cls in dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__):
        source = sys.modules.get(cls.__module__)
        file = getattr(source, "__file__", None)
        if source is not None and file is not None and is_user_file(file) and "site-packages" not in file:
            owners[source.__name__] = source
            owners[cls.__qualname__] = cls
    return owners
