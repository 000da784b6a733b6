"""Change the calls of constructors in classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pipegraph.codegen.syntax.expressions import FunctionCall, ModuleInvocation
from pipegraph.codegen.syntax.statements import ClassSource

Change = Callable[[FunctionCall], FunctionCall]


def changed_classes(
    sources: Sequence[ClassSource], constructor: Change, invocation: Callable[[ModuleInvocation], ModuleInvocation]
) -> list[ClassSource]:
    """Classes with the calls of constructors and of modules changed."""

    def walk(node: Any) -> Any:
        node = node.rebuilt(walk)
        return invocation(node) if isinstance(node, ModuleInvocation) else node

    changed: list[ClassSource] = []
    for original in sources:
        source, forward = with_constructors(original, constructor), tuple(map(walk, original.forward))
        is_unchanged = all(new is old for new, old in zip(forward, original.forward, strict=True))
        changed.append(source if is_unchanged else replace(source, forward=forward))
    return changed


def with_constructors(source: ClassSource, change: Change) -> ClassSource:
    """A class with the calls in its ``__init__`` changed."""

    def changed(nodes: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(changed_node(node, change) for node in nodes)

    children, init, general = changed(source.children), changed(source.init), source.general
    if general is not None:
        general = replace(general, init=changed(general.init))
        return replace(source, children=children, init=init, general=general)
    is_unchanged = all(new is old for new, old in zip((*children, *init), source.constructors, strict=True))
    return source if is_unchanged else replace(source, children=children, init=init)


def changed_node(node: Any, change: Change) -> Any:
    """A node with the calls in it changed, from the innermost ones."""
    node = node.rebuilt(lambda inside: changed_node(inside, change))
    return change(node) if isinstance(node, FunctionCall) else node
