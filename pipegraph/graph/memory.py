"""Which values of a graph share memory, and which are changed in place."""

from __future__ import annotations

import operator

import torch
from torch import fx

from pipegraph.graph.arguments import arguments_of

aten = torch.ops.aten


def is_written(node: fx.Node) -> bool:
    """Whether anything writes into the node's result, or into a view of it."""
    return any(node in written_by(user) or (node in viewed_by(user) and is_written(user)) for user in node.users)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation changes in place; ``detach_`` leaves their values alone."""
    if node.target is aten.detach_.default:
        return []
    return _arguments(node, written=True)


def viewed_by(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the result of an operation may share."""
    return _arguments(node, written=False)


def _arguments(node: fx.Node, written: bool) -> list[fx.Node]:
    """The arguments that the operation's schema marks as changed in place, or as sharing memory with the result."""
    if node.target is operator.getitem:  # a part of a tuple shares its memory
        return [] if written else [node.args[0]]  # type: ignore[list-item]
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    given = arguments_of(node)
    aliases = {each.name: each.alias_info for each in node.target._schema.arguments if each.alias_info is not None}
    marked = [given.get(name) for name, alias in aliases.items() if alias.is_write == written]
    return [value for value in marked if isinstance(value, fx.Node)]


def readers_of(node: fx.Node) -> list[fx.Node]:
    """What reads a node's memory, through views as well."""
    found: list[fx.Node] = []
    waiting = [node]
    while waiting:
        current = waiting.pop()
        for user in current.users:
            found.append(user)
            if current in viewed_by(user) or current in written_by(user):
                waiting.append(user)
    return found


def is_stable(node: fx.Node) -> bool:
    """Whether nothing ever writes into the memory that a value may lie in: a copy of it is then as good as a view."""
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop()
        if current in (written for user in current.users for written in written_by(user)):
            return False
        shared = [user for user in current.users if current in viewed_by(user)]
        for other in (*viewed_by(current), *written_by(current), *shared):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return True
