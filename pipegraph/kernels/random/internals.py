"""Every private interface of torch that random numbers use: one function each, with the reason.

All were checked with torch 2.11, 2.13 and 2.15. One that a new torch breaks raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any


def arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included, which torch leaves out. Only its schema has them.

    The default of a dtype stays out: it is a number there.
    """
    schema = operation._schema.arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value() and each.name != "dtype"}
    return {**defaults, **dict(zip((each.name for each in schema), args, strict=False)), **kwargs}


def redirecting(
    dispatch: Callable[[Any, Any, Sequence[Any], Mapping[str, Any]], Any],
) -> AbstractContextManager[Any]:
    """Give each ATen operation to a function (operation, types, args, kwargs) → result, below autograd.

    The class of such modes has no public place, although torch documents it.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Redirection(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return dispatch(func, types, args, kwargs or {})

    context: AbstractContextManager[Any] = Redirection()
    return context


def takes_distributed(types: Sequence[type]) -> bool:
    """Return whether an operation with arguments of these classes is one of DTensors. `types` holds their classes, and
    that of DTensor is not imported for it."""
    return any(each.__name__ == "DTensor" for each in types)
