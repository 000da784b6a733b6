"""Which values of a graph share memory, and which are changed in place."""

from __future__ import annotations

import operator
from functools import cache

import torch
from torch import fx

from pipegraph.graph.nodes import arguments_of
from pipegraph.graph.operators import operator_of
from pipegraph.torch_private.operators import OpOverload, schema_arguments


def is_written(node: fx.Node) -> bool:
    """Return whether anything writes into the node's result, or into a view of it."""
    return any(node in written_by(user) or (node in viewed_by(user) and is_written(user)) for user in node.users)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation changes in place; ``detach_`` leaves their values alone."""
    if node.target is torch.ops.aten.detach_.default:
        return []
    return _marked_arguments(node, written=True)


def viewed_by(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the result of an operation may share."""
    arguments = _marked_arguments(node, written=False)
    if arguments and operator_of(node).cast and arguments[0].meta["val"].dtype != node.meta["val"].dtype:
        return []
    return arguments


def is_view(node: fx.Node) -> bool:
    """Return whether the result of an operation is the memory of an argument for certain."""
    row = operator_of(node)
    return bool(viewed_by(node)) and not row.may_copy and not row.cast


def _marked_arguments(node: fx.Node, written: bool) -> list[fx.Node]:
    """The arguments that the operation's schema marks as changed in place, or as sharing memory with the result."""
    if node.target is operator.getitem:  # a part of a tuple shares its memory
        return [] if written else [node.args[0]]  # type: ignore[list-item]
    if not isinstance(node.target, OpOverload):
        return []
    names = _marked_names(node.target, written)
    if not names:
        return []
    named = arguments_of(node)
    return [value for value in map(named.get, names) if isinstance(value, fx.Node)]


@cache
def _marked_names(target: OpOverload, written: bool) -> tuple[str, ...]:
    arguments = schema_arguments(target)
    return tuple(
        argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write == written
    )


def readers_of(node: fx.Node) -> list[fx.Node]:
    """The operations that read a node's memory, through views as well."""
    readers: list[fx.Node] = []
    waiting = [node]
    while waiting:
        current = waiting.pop()
        for user in current.users:
            readers.append(user)
            if current in viewed_by(user) or current in written_by(user):
                waiting.append(user)
    return readers


def shared_memory(node: fx.Node, beyond_detach: bool = True) -> set[fx.Node]:
    """A value and all values that may lie in the same memory.

    Args:
        beyond_detach: whether results of ``detach``, and what shares memory only with them, belong to it.
    """
    waiting, visited = [node], {node}
    while waiting:
        current = waiting.pop()
        shared = [user for user in current.users if current in (*viewed_by(user), *written_by(user))]
        for neighbour in (*viewed_by(current), *written_by(current), *shared):
            if neighbour not in visited and (beyond_detach or not operator_of(neighbour).detaches):
                visited.add(neighbour)
                waiting.append(neighbour)
    return visited


def is_stable(node: fx.Node) -> bool:
    """Return whether nothing ever writes into the memory that a value may lie in: a copy is then as good as a view."""
    return not any(
        written_by(alias) or any(alias in written_by(user) for user in alias.users) for alias in shared_memory(node)
    )
