"""A generated class as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pipegraph.codegen.syntax.expressions import Expression, FunctionCall, Node
from pipegraph.codegen.syntax.statements import Statement


@dataclass(frozen=True)
class ClassSource:
    """A class to be rendered.

    Attributes:
        name: of the class.
        docstring: of the class.
        base: the class that it derives from.
        init_parameters: those of ``__init__``.
        children: the arguments that ``__init__`` hands to its base class.
        init: the statements of ``__init__`` behind that.
        parameters: those of ``forward``.
        forward: its statements.
        model_class: the model's own class.
        numbers: what a module of that class holds, under the names of the model.
    """

    name: str
    docstring: str
    base: str = "nn.Module"
    init_parameters: tuple[str, ...] = ()
    children: tuple[Expression, ...] = ()
    init: tuple[Statement, ...] = ()
    parameters: tuple[str, ...] = ()
    forward: tuple[Statement, ...] = ()
    model_class: str = ""
    numbers: Mapping[str, Expression] = field(default_factory=dict)

    @property
    def constructors(self) -> tuple[Node, ...]:
        """What makes the modules that it holds."""
        return *self.children, *self.init

    def walk(self) -> Iterator[Node]:
        """All nodes of its source."""
        for node in (*self.constructors, *self.forward):
            yield from node.walk()

    def uses(self) -> set[str]:
        """The names of the functions and classes that ``__init__`` calls."""
        inside = (node for part in self.constructors for node in part.walk())
        return {node.function.text for node in inside if isinstance(node, FunctionCall)}
