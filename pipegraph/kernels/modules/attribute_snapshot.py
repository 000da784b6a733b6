"""Attributes of modules and items of containers: noticed if tracing changes one, and put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipegraph.kernels.loss import CONTAINERS
from pipegraph.kernels.modules.signature import ATOMS


@contextmanager
def unchanged(objects: Iterable[Any]) -> Iterator[None]:
    """Put the attributes of objects and the items of containers back afterwards, and raise RuntimeError if any changed.

    A traced graph would not make the change again, and a tensor that tracing leaves there has no memory. Containers in
    attributes of modules and in containers count too.
    """
    contents: dict[int, tuple[str, Any, Any]] = {}  # by identity: name, container, copy
    for each in objects:
        if type(each) in CONTAINERS:
            _keep(contents, f"a {type(each).__name__}", each)
        elif isinstance(getattr(each, "__dict__", None), dict):
            # Another object may hold anything, a data set for example: its own attributes are enough.
            _keep(contents, type(each).__name__, vars(each), nested=isinstance(each, nn.Module))
    try:
        yield
        changed = next((name for content in contents.values() if (name := _changed(*content)) is not None), None)
    finally:
        for name, container, copy in contents.values():
            if _changed(name, container, copy) is not None:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(copy)
    if changed is not None:
        raise RuntimeError(f"its forward sets {changed}")


def _keep(contents: dict[int, tuple[str, Any, Any]], name: str, value: Any, nested: bool = True) -> None:
    if type(value) is tuple:
        for item in value:
            _keep(contents, name, item)
    if type(value) in CONTAINERS and id(value) not in contents:
        contents[id(value)] = name, value, value.copy()
        for key, item in _items(value).items() if nested else ():
            _keep(contents, _named(name, key), item)


def _changed(name: str, container: Any, copy: Any) -> str | None:
    """The name of an item that is another object than in the copy, or None. An equal number is no change."""
    now, before = _items(container), _items(copy)
    for key in (*now, *before):
        if key not in now or key not in before or not _same(now[key], before[key]):
            return _named(name, key)
    return None


def _items(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict):
        return container
    return dict(enumerate(container)) if isinstance(container, list) else {id(item): item for item in container}


def _named(name: str, key: Any) -> str:
    return f"{name}.{key}" if isinstance(key, str) else name


def _same(item: Any, other: Any) -> bool:
    return item is other or (type(item) is type(other) and isinstance(item, ATOMS) and item == other)
