"""The expressions of sizes that vary, in a ``forward``: ``x.shape[1]``, or a variable that holds it."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from pipegraph.codegen.forward.local_variables import LocalVariables
from pipegraph.codegen.syntax.expressions import Attribute, Binary, Expression, Name, Subscript, literal
from pipegraph.graph.partition.size_sources import dimension_of
from pipegraph.graph.symbolic_size import SymbolicSize, fold


class SizeVariables:
    """Where a ``forward`` reads the sizes that its operations name.

    Args:
        values: the variables of the ``forward``.
        kept: the sizes that get a variable as soon as a value has them, because a later operation needs them when no
            variable has them any more.
    """

    def __init__(self, values: LocalVariables, kept: Sequence[sympy.Expr]) -> None:
        self._values = values
        self._waiting = list(kept)
        self._variables: dict[sympy.Expr, Name] = {}

    def expression(self, size: SymbolicSize) -> Expression:
        """The expression of a size.

        Raises:
            UnknownSizeError: no value has a size from which it follows.
        """
        return fold(size.expression, self._read, Binary)

    def keep(self) -> None:
        """Write ``seq = x.shape[1]`` for the waiting sizes that a value has."""
        for size in list(self._waiting):
            found = self._read(size)
            if found is not None:
                self._variables[size] = self._values.keep(str(size), found)
                self._waiting.remove(size)

    def _read(self, size: sympy.Expr) -> Expression | None:
        """A number, or ``x.shape[1]`` for the first variable that has a size; None if no value has it."""
        values = self._values
        if size.is_Integer:
            return literal(int(size))
        if size in self._variables:
            return self._variables[size]
        found = next((name for name, node in values.variables.items() if dimension_of(node, size) is not None), None)
        if found is None:
            node = next((node for node in values.deferred if dimension_of(node, size) is not None), None)
            if node is None:
                return None
            values.write(node)
            return self._read(size)
        dim = dimension_of(values.variables[found], size)
        return Subscript(Attribute(Name(found), "shape"), (literal(dim),))
