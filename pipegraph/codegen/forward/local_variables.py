"""Where the values of a ``forward`` stand while it is written: in a variable, in an attribute, or on no line yet."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from pipegraph.codegen.forward.items import Item
from pipegraph.codegen.forward.value_names import ValueNames
from pipegraph.codegen.names.identifiers import unused, variable
from pipegraph.codegen.syntax.expression import Expression

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Pending:
    """A value that is not written yet: it may stand inside the expression of its only reader. ``names`` are the
    variables that its expression mentions, ``regions`` the ``with`` headers that it stands under."""

    expression: Expression
    names: frozenset[str]
    regions: tuple[str, ...]
    item: Item


class Values:
    """The lines of a ``forward`` so far, and where each value stands.

    Args:
        names: what the values are called.
        uses: how often each is mentioned.
        attributes, parameters: the expressions of state and the names of arguments.

    Attributes:
        lines: the statements, each with its ``with`` headers.
        left: how often each value is still to be mentioned.
        variables: variable → the value that it holds.
        written: value → its expression, once it has one.
        pending: values that are not written yet.
        clashes: names that values wanted in vain, because another was needed still.
    """

    def __init__(
        self,
        names: ValueNames,
        uses: Counter[fx.Node],
        attributes: Mapping[fx.Node, str],
        parameters: Mapping[fx.Node, str],
    ) -> None:
        self._names = names
        self.lines: list[tuple[tuple[str, ...], str]] = []
        self.left = uses
        self.variables = {name: node for node, name in parameters.items()}
        self.written = {node: Expression(text) for node, text in {**attributes, **parameters}.items()}
        self.pending: dict[fx.Node, Pending] = {}
        self.clashes: list[str] = []
        self._mentioned: frozenset[str] = frozenset()  # by lines that are about to be written

    def use(self, node: fx.Node) -> Expression:
        """The expression of a value, used once more."""
        self.left[node] -= 1
        if node in self.pending:
            return self.pending.pop(node).expression
        return self.written[node]

    def bind(
        self, node: fx.Node, wanted: str, mentioned: frozenset[str] = frozenset(), kept: Collection[fx.Node] = ()
    ) -> str:
        """A variable for a value: the wanted name, or that with a number while the name is still needed.

        Args:
            mentioned: the variables in the expression that it will be assigned.
            kept: pending values that are not to be written for that name to become free.
        """
        name = variable(wanted, "x")
        self._free(name, mentioned, kept)
        if name in self.taken():
            self.clashes.append(wanted)
        name = unused(name, self.taken())
        self.variables[name] = node
        self.written[node] = Expression(name)
        return name

    def _free(self, name: str, mentioned: frozenset[str], kept: Collection[fx.Node]) -> None:
        """Write what holds on to a variable only because it is not written yet."""
        holders = [node for node, pending in self.pending.items() if name in pending.names]
        if name in self._live() or name in self._mentioned or any(node in kept for node in holders):
            return
        before, self._mentioned = self._mentioned, self._mentioned | mentioned
        for node in holders:
            self.settle(node)
        self._mentioned = before

    def settle(self, node: fx.Node, kept: Collection[fx.Node] = ()) -> None:
        """Write a pending value on a line of its own."""
        pending = self.pending.pop(node, None)
        if pending is None:
            return
        name = self.bind(node, self._names.of(pending.item, node), pending.names, kept)
        self.lines.append((pending.regions, f"{name} = {pending.expression.text}"))

    def flush(self, except_for: Iterable[fx.Node]) -> None:
        """Write all pending values on lines of their own."""
        kept = set(except_for)
        for node in [node for node in self.pending if node not in kept]:
            self.settle(node)

    def taken(self) -> set[str]:
        """Variables that something still reads, directly or inside a pending expression."""
        return self._live() | self._mentioned.union(*(pending.names for pending in self.pending.values()))

    def _live(self) -> set[str]:
        return {name for name, node in self.variables.items() if self.left[node] > 0 and self._reads_name(name, node)}

    def _reads_name(self, name: str, node: fx.Node) -> bool:
        return node not in self.written or self.written[node].text == name

    def held_names(self, node: fx.Node) -> frozenset[str]:
        """The variables that the expression of a value mentions."""
        if node in self.pending:
            return self.pending[node].names
        text = self.written[node].text if node in self.written else ""
        return frozenset(_NAME.findall(text)) & self.variables.keys()
