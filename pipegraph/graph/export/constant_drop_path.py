"""Branches that a model would take at random, with a probability of 0 or 1: stochastic depth that is switched off."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LESS_THAN, _GREATER = ("lt", "le"), ("gt", "ge")


class FoldConstantDropPath(TorchFunctionMode):
    """Decides a comparison of one number of `torch.rand`, which is at least 0 and below 1, if it has one outcome.

    What depends on the values of a tensor cannot be traced; ``torch.rand([]) < 0`` depends on none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._random_scalars: dict[int, Tensor] = {}  # holds them: an id stays its own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _LESS_THAN + _GREATER and len(args) == 2 and not kwargs and id(args[0]) in self._random_scalars:
            certain = _outcome(name, args[1])
            if certain is not None:
                return torch.tensor(certain)
        result = func(*args, **kwargs)
        if func in (torch.rand, torch.rand_like) and result.ndim == 0:
            self._random_scalars[id(result)] = result
        return result


def _outcome(name: str, bound: Any) -> bool | None:
    """What a comparison of any number from 0 to below 1 with a bound gives; None if it depends on the number."""
    if not isinstance(bound, (int, float)):
        return None
    if bound >= 1:
        return name in _LESS_THAN
    if bound < 0 or (bound == 0 and name in ("lt", "ge")):
        return name in _GREATER
    return None
