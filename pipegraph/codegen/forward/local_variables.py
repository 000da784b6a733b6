"""The local variables of a ``forward`` while it is written, values that are not written yet, and lists."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Collection as AbstractCollection
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import fx

from pipegraph.codegen.forward.items import Item, ModuleCall, StatementLoop
from pipegraph.codegen.names.identifiers import unused, variable
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
from pipegraph.codegen.syntax.statements import Assign, Block, Statement

Contexts = tuple[Block, ...]

Part = TypeVar("Part", bound=Node)

_STARRED = "*{}"
# So many elements, one after the other, are written as a part of their list.
_RUN = 3


@dataclass(frozen=True)
class DeferredValue:
    """A value that is not written yet, because it may go inside the expression of its only reader."""

    expression: Expression
    contexts: Contexts
    item: Item


class LocalVariables:
    """The statements of a ``forward`` so far, and the place of each value: a variable, an attribute, or deferred.

    Args:
        name: returns the name of a value that an item makes.
        uses: how often each value is mentioned.
        attributes: the expressions of parameters and buffers.
        parameters: the names of the parameters of ``forward``.

    Attributes:
        statements: each with the blocks around it.
        uses_left: how often each value will still be mentioned.
        variables: variable → the value in it.
        written: value → its expression, if a statement or parameter has made it.
        deferred: the values that are not written yet.
        clashes: the names that values did not get because another value was still needed under them.
    """

    def __init__(
        self,
        name: Callable[[Item, fx.Node], str],
        uses: Counter[fx.Node],
        attributes: Mapping[fx.Node, Expression],
        parameters: Mapping[fx.Node, str],
    ) -> None:
        self._name = name
        self.statements: list[tuple[Contexts, Statement]] = []
        self.uses_left = uses
        self.variables = {name: node for node, name in parameters.items()}
        self.written: dict[fx.Node, Expression] = {
            **attributes,
            **{node: Name(name) for node, name in parameters.items()},
        }
        self.deferred: dict[fx.Node, DeferredValue] = {}
        self.clashes: list[str] = []
        self._reserved = frozenset[str]()  # variables that statements about to be written mention

    def expression(self, node: fx.Node) -> Expression:
        """The expression of a value."""
        return self.deferred[node].expression if node in self.deferred else self.written[node]

    def consume(self, nodes: Iterable[fx.Node]) -> None:
        """Count one mention of each value. A deferred value is inside the expression of its reader now."""
        for node in nodes:
            self.uses_left[node] -= 1
            self.deferred.pop(node, None)

    def keep(self, base_name: str, value: Expression) -> Name:
        """Assign a value other than a tensor to a variable that is not assigned again."""
        name = unused(variable(base_name, "x"), self.used_names())
        self.variables.pop(name, None)  # of a value that nothing reads any more
        self._reserved |= {name}
        self.statements.append(((), Assign((Name(name),), value)))
        return Name(name)

    def bind(
        self, node: fx.Node, base_name: str, value: Expression | None = None, exempt: AbstractCollection[fx.Node] = ()
    ) -> str:
        """Make a variable for a value. It gets the wanted name, with a number if that name is still needed.

        Args:
            value: the expression that the variable will be assigned.
            exempt: deferred values that must stay deferred, even if the name does not become free.
        """
        name = variable(base_name, "x")
        self._free(name, self._variables_in(value), exempt)
        if name in self.used_names():
            self.clashes.append(base_name)
        name = unused(name, self.used_names())
        self.variables[name] = node
        self.written[node] = Name(name)
        return name

    def _free(self, name: str, mentioned: frozenset[str], exempt: AbstractCollection[fx.Node]) -> None:
        """Write the deferred values that read a variable, if nothing else keeps its name in use."""
        readers = [node for node, value in self.deferred.items() if name in self._variables_in(value.expression)]
        if name in self._live() or name in self._reserved or any(node in exempt for node in readers):
            return
        previous_reserved, self._reserved = self._reserved, self._reserved | mentioned
        for node in readers:
            self.write(node)
        self._reserved = previous_reserved

    def write_readers(self, name: str) -> None:
        """Write the deferred values that read a variable, before a statement assigns another value to it."""
        previous_reserved, self._reserved = self._reserved, self._reserved | {name}
        for node in [node for node, value in self.deferred.items() if name in value.expression.names()]:
            self.write(node)
        self._reserved = previous_reserved

    def write(self, node: fx.Node, exempt: AbstractCollection[fx.Node] = ()) -> None:
        """Write a deferred value as a separate statement."""
        value = self.deferred.pop(node, None)
        if value is None:
            return
        name = self.bind(node, self._name(value.item, node), value.expression, exempt)
        self.statements.append((value.contexts, Assign((Name(name),), value.expression)))

    def write_all(self, except_for: Iterable[fx.Node]) -> None:
        """Write all deferred values as separate statements."""
        exempt = set(except_for)
        for node in [node for node in self.deferred if node not in exempt]:
            self.write(node)

    def assign(self, pairs: Iterable[tuple[Name, Expression]], contexts: Contexts) -> None:
        """Assign values to names; all at once if one of the values is read from a name that another one is given."""
        changed = [(name, value) for name, value in pairs if name.text != value.text]
        overwritten = any(
            target.text in value.names()
            for place, (target, _) in enumerate(changed)
            for _, value in changed[place + 1 :]
        )
        if overwritten:
            targets, assigned = zip(*changed, strict=True)
            self.statements.append((contexts, Assign(targets, Collection(assigned, "()"))))
        else:
            self.statements += [(contexts, Assign((target,), value)) for target, value in changed]

    def used_names(self) -> set[str]:
        """The variables that later code reads, directly or inside a deferred expression."""
        inside = (self._variables_in(value.expression) for value in self.deferred.values())
        return self._live() | self._reserved.union(*inside)

    def _live(self) -> set[str]:
        return {name for name, node in self.variables.items() if self.uses_left[node] > 0 and self._is_in(name, node)}

    def _is_in(self, name: str, node: fx.Node) -> bool:
        return node not in self.written or self.written[node] == Name(name)

    def _variables_in(self, value: Expression | None) -> frozenset[str]:
        return frozenset(value.names() & self.variables.keys()) if value is not None else frozenset()


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
            for run, sequence in ((elements, name), (elements[::-1], backwards)):
                starts = range(len(items) - len(run) + 1)
                start = next((at for at in starts if items[at : at + len(run)] == run), None)
                if start is not None:
                    items = (*items[:start], Template(_STARRED, (sequence,)), *items[start + len(run) :])
        expressions: list[Expression] = []
        while len(items) > 0:
            count, part = self._part(items)
            expressions.append(Template(_STARRED, (part,)) if part is not None else items[0])
            items = items[count:]
        return tuple(expressions)

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
        element = _element(items[0])
        length = self.length(element[0]) if element is not None else None
        if element is None or length is None:
            return 1, None
        name, first = element
        count = next((at for at, item in enumerate(items) if _element(item) != (name, first + at)), len(items))
        if count < _RUN:
            return 1, None
        stop = literal(first + count) if first + count < length else None
        bounds = Slice(literal(first) if first else None, stop)
        return count, name if bounds == Slice() else Subscript(name, (bounds,))


def _element(item: Expression) -> tuple[Name, int] | None:
    """``outputs`` and 2 of ``outputs[2]``."""
    match item:
        case Subscript(owner=Name() as owner, indices=(Literal(is_number=True) as index,)) if index.text.isdecimal():
            return owner, int(index.text)
    return None


def indexed_tuples(items: Iterable[Item]) -> dict[fx.Node, str]:
    """The tuples whose parts a loop goes over, ``for piece in x.chunk(4)`` → the name of an element in the source."""
    element_names: dict[fx.Node, str] = {}
    for loop in (item for item in items if isinstance(item, StatementLoop)):
        parts = [node for node in loop.reads if node.target is operator.getitem]
        for tuple_node in {node.args[0] for node in parts if isinstance(node.args[0], fx.Node)}:
            if len(loop.iterations) == sum(part.args[0] is tuple_node for part in parts):
                element_names[tuple_node] = "" if goes_over_modules(loop) else loop.source.element
    return element_names


def goes_over_modules(loop: StatementLoop) -> bool:
    """Return whether a step calls another module in each iteration."""
    rows = zip(*loop.iterations, strict=True)
    return any(len({step.fqn for step in steps if isinstance(step, ModuleCall)}) > 1 for steps in rows)
