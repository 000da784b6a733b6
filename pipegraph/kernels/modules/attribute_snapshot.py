"""Attributes of modules and items of containers as they stand: to see what changed, and to put it back."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipegraph.kernels.modules.signature import ATOMS

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


@dataclass(frozen=True, slots=True)
class _ContainerContent:
    """A container, called `name`, and what it held: `content` keeps alive what `identities` are of."""

    name: str
    container: Any
    content: Any
    identities: tuple[Any, ...]

    def changed(self) -> str | None:
        """The name of an item that is another one than before."""
        if _identities(self.container) == self.identities:
            return None
        now, before = _items(self.container), _items(self.content)
        names = (name for name in (*now, *before) if not _same(now.get(name, _NOTHING), before.get(name, _NOTHING)))
        return next((f"{self.name}.{name}" if isinstance(name, str) else self.name for name in names), None)

    def restore(self) -> None:
        if _identities(self.container) != self.identities:
            self.container.clear()
            (self.container.extend if isinstance(self.container, list) else self.container.update)(self.content)


class AttributeSnapshot:
    """The attributes of modules, and the items of lists, dicts and sets, those in them too."""

    def __init__(self, held: Iterable[Any]) -> None:
        self._kept: dict[int, _ContainerContent] = {}
        for each in held:
            if isinstance(each, nn.Module):
                self._keep(type(each).__name__, vars(each))
            else:
                self._keep(f"a {type(each).__name__}", each)

    def changed(self) -> str | None:
        """The name of an attribute that changed; None where none did. Takes microseconds per module."""
        filled = (kept for kept in self._kept.values() if kept.container or kept.identities)  # most are empty: hooks
        return next((name for kept in filled if (name := kept.changed()) is not None), None)

    def restore(self) -> None:
        """Put back what stood there."""
        for kept in self._kept.values():
            kept.restore()

    def _keep(self, name: str, value: Any) -> None:
        if type(value) is tuple:
            for item in value:
                self._keep(name, item)
        if type(value) not in _CONTAINERS or id(value) in self._kept:
            return
        content = dict(value) if isinstance(value, dict) else type(value)(value)
        self._kept[id(value)] = _ContainerContent(name, value, content, _identities(value))
        for key, item in _items(value).items():
            self._keep(f"{name}.{key}" if isinstance(key, str) else name, item)


@contextmanager
def unchanged(held: Iterable[Any]) -> Iterator[None]:
    """RuntimeError where something in modules, lists, dicts and sets is another one afterwards: a graph does not put it
    there, and what tracing puts there has no memory. It is put back as it was."""
    before = AttributeSnapshot(held)
    try:
        yield
        changed = before.changed()
    finally:
        before.restore()
    if changed is not None:
        raise RuntimeError(f"its forward sets {changed}")


_NOTHING = object()


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
