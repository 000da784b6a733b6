"""The lists and tuples of a ``forward``: their lengths, and ``*outputs`` in place of their elements."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from torch import fx

from pipegraph.codegen.forward.items import Item, ModuleCall, StatementLoop
from pipegraph.codegen.forward.local_variables import LocalVariables
from pipegraph.codegen.syntax.expressions import (
    Collection,
    Expression,
    Literal,
    Name,
    Node,
    Slice,
    Subscript,
    Template,
    literal,
)

Part = TypeVar("Part", bound=Node)
_STARRED = "*{}"
# So many elements, one after the other, are written as a part of their list.
_RUN = 3


class Lists:
    """The lists to which the loops of one ``forward`` append, and its variables that are tuples.

    Args:
        values: the variables of the ``forward``.
    """

    def __init__(self, values: LocalVariables) -> None:
        self._values = values
        self._elements: dict[Name, tuple[fx.Node, ...]] = {}

    def add(self, name: Name, elements: tuple[fx.Node, ...]) -> None:
        """Add a list, with its elements. Each is written as ``outputs[0]``, or as a variable that has it as well."""
        self._elements[name] = elements

    def length(self, owner: Expression) -> int | None:
        """The number of elements of a list or tuple; None for anything else."""
        if not isinstance(owner, Name):
            return None
        node = self._values.variables.get(owner.name)
        value = node.meta.get("val") if node is not None else self._elements.get(owner)
        return len(value) if isinstance(value, (tuple, list)) else None

    def with_lists(self, node: Part) -> Part:
        """Source with ``outputs`` in place of ``[outputs[0], outputs[1], …]``, also inside of a longer list."""

        def change(part: Any) -> Any:
            if isinstance(part, Collection):
                items = self.with_runs(part.items)
                if len(items) == 1 and isinstance(items[0], Template) and items[0].template == _STARRED:
                    return items[0].operands[0]
                part = replace(part, items=items) if items != part.items else part
            return part.rebuilt(change)

        changed: Part = change(node) if self._elements else node
        return changed

    def with_runs(self, items: tuple[Expression, ...]) -> tuple[Expression, ...]:
        """Expressions with ``*outputs`` in place of all elements of a list, and ``*outputs[2:]`` in place of some."""
        for name in self._elements:
            elements = self._expressions(name)
            backwards = Subscript(name, (Slice(step=literal(-1)),))
            for run, whole in ((elements, name), (elements[::-1], backwards)):
                starts = range(len(items) - len(run) + 1)
                start = next((at for at in starts if items[at : at + len(run)] == run), None)
                if start is not None:
                    items = (*items[:start], Template(_STARRED, (whole,)), *items[start + len(run) :])
        made: list[Expression] = []
        while len(items) > 0:
            count, some = self._part(items)
            made.append(Template(_STARRED, (some,)) if some is not None else items[0])
            items = items[count:]
        return tuple(made)

    def _expressions(self, name: Name) -> tuple[Expression, ...]:
        """The expressions of the elements of a list. A variable that has another value by now is that of none."""
        written = ((node, self._values.written[node]) for node in self._elements[name])
        return tuple(
            place
            if not isinstance(place, Name) or self._values.variables.get(place.name) is node
            else Subscript(name, (literal(number),))
            for number, (node, place) in enumerate(written)
        )

    def _part(self, items: tuple[Expression, ...]) -> tuple[int, Expression | None]:
        """How many of the items begin as elements of one list, and that part of the list; else 1 and None."""
        found = _element(items[0])
        length = self.length(found[0]) if found is not None else None
        if found is None or length is None:
            return 1, None
        name, first = found
        count = next((at for at, item in enumerate(items) if _element(item) != (name, first + at)), len(items))
        if count < _RUN:
            return 1, None
        stop = literal(first + count) if first + count < length else None
        some = Slice(literal(first) if first else None, stop)
        return count, name if some == Slice() else Subscript(name, (some,))


def _element(item: Expression) -> tuple[Name, int] | None:
    """``outputs`` and 2 of ``outputs[2]``."""
    match item:
        case Subscript(owner=Name() as owner, indices=(Literal(is_number=True) as index,)) if index.text.isdecimal():
            return owner, int(index.text)
    return None


def indexed_tuples(items: Iterable[Item]) -> dict[fx.Node, str]:
    """The tuples whose parts a loop goes over, ``for piece in x.chunk(4)`` → the name of an element in the source."""
    found: dict[fx.Node, str] = {}
    for loop in (item for item in items if isinstance(item, StatementLoop)):
        parts = [node for node in loop.reads if node.target is operator.getitem]
        for each in {node.args[0] for node in parts if isinstance(node.args[0], fx.Node)}:
            if len(loop.iterations) == sum(part.args[0] is each for part in parts):
                found[each] = "" if goes_over_modules(loop) else loop.source.element
    return found


def goes_over_modules(loop: StatementLoop) -> bool:
    """Return whether a step calls another module in each iteration."""
    rows = zip(*loop.iterations, strict=True)
    return any(len({step.fqn for step in steps if isinstance(step, ModuleCall)}) > 1 for steps in rows)
