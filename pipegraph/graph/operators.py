"""The arguments of an operation by name, however the model gave them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """name in the operation's schema → what the graph hands over; arguments left to their default are not in it."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = (argument.name for argument in node.target._schema.arguments)
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
