"""Integer inputs index something: how large may they be?"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Operations that hand indices on as they are.
_SAME_VALUES = frozenset(
    [
        "view",
        "reshape",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "expand",
        "to",
        "contiguous",
        "flatten",
        "transpose",
        "permute",
        "clone",
        "t",
    ]
)


def index_bound(node: fx.Node) -> int | None:
    """The smallest exclusive upper bound over everything that an integer input indexes; None if it indexes nothing."""
    bounds: list[int] = []
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop()
        for user in current.users:
            bounds += _bounds(user, current)
            target = user.target
            same = isinstance(target, torch._ops.OpOverload) and target._opname in _SAME_VALUES
            if same and user not in seen:
                seen.add(user)
                waiting.append(user)
    return min(bounds, default=None)


def _bounds(user: fx.Node, index: fx.Node) -> list[int]:
    args: tuple[Any, ...] = user.args
    if user.target is aten.embedding.default and args[1] is index:
        return [_shape(args[0])[0]]
    if user.target is aten.index.Tensor:
        return [_shape(args[0])[dim] for dim, each in enumerate(args[1]) if each is index]
    if user.target in (aten.gather.default, aten.index_select.default, aten.take_along_dim.default) and index in args:
        indices_first = user.target is aten.take_along_dim.default
        dim, source = (args[2], args[1]) if indices_first else (args[1], args[2])
        return [_shape(args[0])[dim]] if source is index else []
    if user.target is aten.one_hot.default and len(args) > 1 and args[1] > 0:
        return [args[1]]
    if user.target is aten.cross_entropy_loss.default and args[1] is index:
        return [_shape(args[0])[1]]
    return []


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
