"""The modules that the items of a ``forward`` call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipegraph.codegen.forward.items import Item, ModeBranch, ModuleCall, ModuleLoop, Modules, StatementLoop
from pipegraph.codegen.names.identifiers import outer_names
from pipegraph.codegen.syntax.expressions import FunctionCall


def calls_in(item: Item) -> Iterator[ModuleCall]:
    """The calls of modules in an item."""
    if isinstance(item, ModuleCall):
        yield item
    elif isinstance(item, ModuleLoop):
        yield from item.calls
    elif isinstance(item, (ModeBranch, StatementLoop)):
        for step in item.inner if isinstance(item, ModeBranch) else item.steps:
            yield from calls_in(step)


def modules_in(items: Iterable[Item]) -> Modules:
    """The modules that items need, directly or inside others."""
    every = [call.modules for item in items for call in calls_in(item)]
    return Modules(*(frozenset[str]().union(*column) for column in zip(*every, strict=True))) if every else Modules()


def conflicts(items: Iterable[Item]) -> frozenset[str]:
    """The modules whose calls cannot stay calls: two of them need different classes, or a module inside is called from
    outside as well."""
    constructors: dict[str, FunctionCall] = {}
    modules = set()
    for item in items:
        if isinstance(item, ModuleCall) and constructors.setdefault(item.fqn, item.constructor) != item.constructor:
            modules.add(item.fqn)
    modules.update(outer for inner in constructors for outer in outer_names(inner) if outer in constructors)
    return frozenset(modules)
