"""Attributes of modules and items of containers: noticed if tracing changes one, and put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipegraph.kernels.loss import CONTAINERS
from pipegraph.kernels.modules.signature import ATOMS

_MISSING = object()


@contextmanager
def unchanged(objects: Iterable[Any]) -> Iterator[None]:
    """Put the attributes of objects and the items of containers back afterwards, and raise RuntimeError if any changed.

    A traced graph would not make the change again, and a tensor that tracing leaves there has no memory. Containers in
    attributes of modules and in containers count too.
    """
    before = AttributeSnapshot(objects)
    try:
        yield
        changed = before.changed()
    finally:
        before.restore()
    if changed is not None:
        raise RuntimeError(f"its forward sets {changed}")


class AttributeSnapshot:
    """What objects and containers held when this was made."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._contents: dict[int, _ContainerContent] = {}
        for each in objects:
            if type(each) in CONTAINERS:
                self._keep(f"a {type(each).__name__}", each)
            elif isinstance(getattr(each, "__dict__", None), dict):
                # Another object may hold anything, a data set for example: its own attributes are enough.
                self._keep(type(each).__name__, vars(each), nested=isinstance(each, nn.Module))

    def changed(self) -> str | None:
        """Return the name of an attribute or container that changed, or None."""
        return next((name for content in self._contents.values() if (name := content.changed()) is not None), None)

    def restore(self) -> None:
        """Put back what changed."""
        for content in self._contents.values():
            content.restore()

    def _keep(self, name: str, value: Any, nested: bool = True) -> None:
        if type(value) is tuple:
            for item in value:
                self._keep(name, item)
        if type(value) not in CONTAINERS or id(value) in self._contents:
            return
        copy = dict(value) if isinstance(value, dict) else type(value)(value)
        self._contents[id(value)] = _ContainerContent(name, value, copy, _identities(value))
        for key, item in _items(value).items() if nested else ():
            self._keep(f"{name}.{key}" if isinstance(key, str) else name, item)


@dataclass(frozen=True, slots=True)
class _ContainerContent:
    """A container and a copy of its content, which keeps the objects alive that `identities` are of."""

    name: str
    container: Any
    copy: Any
    identities: tuple[Any, ...]

    def changed(self) -> str | None:
        """Return the name of an item that is another object now, or None. An equal number is no change."""
        if _identities(self.container) == self.identities:
            return None
        now, before = _items(self.container), _items(self.copy)
        keys = (key for key in (*now, *before) if not _same(now.get(key, _MISSING), before.get(key, _MISSING)))
        return next((f"{self.name}.{key}" if isinstance(key, str) else self.name for key in keys), None)

    def restore(self) -> None:
        if _identities(self.container) != self.identities:
            self.container.clear()
            (self.container.extend if isinstance(self.container, list) else self.container.update)(self.copy)


def _identities(container: Any) -> tuple[Any, ...]:
    if isinstance(container, dict):
        return (*container, *map(id, container.values()))
    return tuple(map(id, container))


def _items(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict):
        return container
    return dict(enumerate(container)) if isinstance(container, list) else {id(item): item for item in container}


def _same(item: Any, other: Any) -> bool:
    return item is other or (type(item) is type(other) and isinstance(item, ATOMS) and item == other)
