"""The arguments of the constructor of a class that stands for two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipegraph.codegen.classes.merge_bodies import Statements
from pipegraph.codegen.classes.unify import NONE, Difference, InitArgument
from pipegraph.codegen.names.identifiers import attribute_variable, unused
from pipegraph.codegen.syntax.expressions import SELF, Attribute, Expression, Name, literal
from pipegraph.codegen.syntax.statements import ClassSource

TRUE, FALSE = literal(True), literal(False)


@dataclass
class MergedArguments:
    """The arguments of the constructor of a merged class: one for each pair of values in which the members differ.

    Attributes:
        members: the two classes.
        reserved: names that an argument must not have.
        values: parameter → the value of each member.
        defaults, modules, stored: the parameters with defaults, those that are modules, those that ``forward`` reads.
    """

    members: tuple[ClassSource, ClassSource]
    reserved: set[str]
    values: dict[str, tuple[Expression | None, Expression | None]] = field(default_factory=dict)
    defaults: dict[str, Expression] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    stored: dict[str, None] = field(default_factory=dict)

    def closed(self, statements: Statements, in_init: bool) -> Statements:
        """Statements with the parameters in place of differences."""

        def close(node: Any) -> Any:
            if isinstance(node, InitArgument):
                first, second = (node, None) if node.side == 0 else (None, node)
                node = Difference(first, second, node.name, node.is_module)
            if not isinstance(node, Difference):
                return node.rebuilt(close)
            name = self._parameter(node)
            if in_init:
                return Name(name)
            self.stored[name] = None
            return Attribute(SELF, name)

        return tuple(map(close, statements))

    def _parameter(self, difference: Difference) -> str:
        pair = difference.first, difference.second
        for name, values in self.values.items():
            if all(own is None or own == other for own, other in zip(pair, values, strict=True)):
                return name
        name = unused(attribute_variable(self._name(difference), "size"), {*self.reserved, *self.values})
        self.values[name] = pair
        default = self._default(pair)
        if default is not None:
            self.defaults[name] = default
        if difference.is_module:
            self.modules.add(name)
        return name

    def _name(self, difference: Difference) -> str:
        for value in (difference.first, difference.second):
            if isinstance(value, InitArgument):
                return value.name
        own = [
            name
            for name, value in self.members[0].attributes.items()
            if (value, self.members[1].attributes.get(name)) == (difference.first, difference.second)
        ]
        return difference.name if difference.name in own or not own else own[0]

    def _default(self, pair: tuple[Expression | None, Expression | None]) -> Expression | None:
        """The default of a parameter: None for what a member does not have, False for a flag."""
        known = [
            member.init_defaults.get(value.name) if isinstance(value, InitArgument) else value
            for value, member in zip(pair, self.members, strict=True)
            if value is not None
        ]
        if all(value in (TRUE, FALSE) for value in known):
            return FALSE
        return NONE if NONE in known or None in pair else None

    def ordered(self) -> list[str]:
        """The parameters; those with a default come last."""
        return sorted(self.values, key=lambda name: name in self.defaults)
