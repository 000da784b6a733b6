"""Operators of torch: their schemas, and what kind of operator each is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "argument_names",
    "aten",
    "defining_module",
    "is_collective",
    "is_mutable",
    "is_view_operation",
    "operator_name",
    "schema_arguments",
]


def operator_name(target: OpOverload) -> tuple[str, str]:
    """(``softmax``, ``int``) of ``aten.softmax.int``; publicly there is only the text of the whole."""
    return target._opname, target._overloadname


def schema_arguments(target: OpOverload) -> Sequence[Any]:
    """The arguments of an operator's schema, each with ``name``, ``alias_info``, ``kwarg_only`` and default."""
    return target._schema.arguments


aten = torch.ops.aten


def argument_names(operation: Any) -> list[str]:
    """Return the names of an operation's arguments. Only its schema has them."""
    return [argument.name for argument in operation._schema.arguments]


def is_mutable(operation: Any) -> bool:
    """Return whether an operation writes to an argument. Only its schema says so."""
    return isinstance(operation, OpOverload) and bool(operation._schema.is_mutable)


def is_view_operation(operation: Any) -> bool:
    """Return whether an operation's one result shares the memory of an argument. Only its schema says so."""
    returns = operation._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None


def is_collective(node: fx.Node) -> bool:
    """Return whether other ranks take part in a node, or it waits for them. Torch has no tag for that."""
    return getattr(node.target, "namespace", None) == "_c10d_functional"


def defining_module(target: OpOverload) -> str | None:
    """Return the module in which ``torch.library.custom_op`` defined an operator; None if it was defined otherwise.

    ``OPDEFS`` is private. Publicly, nothing finds the definition of an operator by its name.
    """
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(target._schema.name)
    return definition._init_fn.__module__ if definition is not None else None
