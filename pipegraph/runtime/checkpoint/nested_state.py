"""Lists, tuples and dicts of tensors in the state of an optimizer, such as the factors of SOAP.

{"GG": [m, n], "step": 3} ─▶ tensors "GG/0" and "GG/1", and what is around them in plain values
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch import Tensor

_CONTAINERS: Final = {"list": list, "tuple": tuple, "dict": dict}
_PLAIN: Final = int | float | str | None
SEPARATOR: Final = "/"
"""Between the key of a state, and the positions of a tensor in the containers that it holds."""


def is_container(value: object) -> bool:
    """Whether a value is of a kind that may hold tensors: exactly a list, a tuple or a dict."""
    return type(value) in _CONTAINERS.values()


def is_structure(value: object) -> bool:
    """Whether this is what `structure_of` returned. A dict of the user's own never stands alone in a saved state."""
    return isinstance(value, Mapping)


def structure_of(value: Any) -> Any:
    """A value without its tensors. Raises TypeError for a value of any other class than those that are saved."""
    if isinstance(value, Tensor):
        return {"kind": "tensor"}
    if is_container(value):
        keys = list(value) if isinstance(value, dict) else None
        if keys is not None and not all(isinstance(key, int | str) for key in keys):
            raise TypeError("dict with keys that are neither numbers nor strings")
        return {"kind": type(value).__name__, "keys": keys, "items": [structure_of(item) for item in _items(value)]}
    if not isinstance(value, _PLAIN):
        raise TypeError(type(value).__name__)
    return {"kind": "plain", "value": value}


def tensors_of(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a value, each by the name of the value and its positions: ``"GG/0"``."""
    if isinstance(value, Tensor):
        yield name, value
    elif is_container(value):
        for position, item in enumerate(_items(value)):
            yield from tensors_of(item, f"{name}{SEPARATOR}{position}")


def value_of(structure: Mapping[str, Any], name: str, tensor: Callable[[str], Tensor]) -> Any:
    """The value of a structure, with the tensors that `tensor` returns for their names."""
    kind = structure["kind"]
    if kind == "tensor":
        return tensor(name)
    if kind == "plain":
        return structure["value"]
    items = [value_of(item, f"{name}{SEPARATOR}{position}", tensor) for position, item in enumerate(structure["items"])]
    return dict(zip(structure["keys"], items, strict=True)) if kind == "dict" else _CONTAINERS[kind](items)


def _items(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)
