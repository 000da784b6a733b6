"""Numbers that the source of a model reads from its modules: ``self.eps``, ``self.width**-0.5``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import fx

from pipegraph.codegen.names.identifiers import is_plain
from pipegraph.codegen.names.source_statements import SourceStatement, SourceStatements
from pipegraph.codegen.syntax.expressions import (
    SELF,
    Argument,
    Attribute,
    Binary,
    Expression,
    FunctionCall,
    Literal,
    literal,
    unary,
)
from pipegraph.graph.captured import Captured
from pipegraph.graph.nodes import path_of

Number = int | float

_OPERATORS: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Number]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
}
# These stand in many expressions that have nothing to do with an attribute of the same value.
_COMMON = (0, 0.5, 1, 2)


class ModuleNumbers:
    """Writes the numbers of one ``forward`` as its source does.

    Args:
        captured: the model.
        source: finds the statements of its source.
        fqn: the module.

    Attributes:
        used: the attributes that were written → their values.
    """

    def __init__(self, captured: Captured, source: SourceStatements, fqn: str) -> None:
        self.used: dict[str, Expression] = {}
        self._source = source
        self._fqn = fqn
        module = captured.modules[fqn].module
        self._attributes = _numbers(vars(module))
        # An attribute that numbers the modules, such as that of a layer, is no constant of the class.
        alike = [vars(each.module) for each in captured.modules.values() if type(each.module) is type(module)]
        constant = {
            name: value for name, value in self._attributes.items() if all(each.get(name) == value for each in alike)
        }
        found: dict[str, Expression | None] = {}
        for value, expression, _ in _expressions(source.of_forward(fqn), constant):
            text = literal(value).text
            if found.setdefault(text, expression) != expression or abs(value) in _COMMON:
                found[text] = None  # it may be another number
        self._in_forward = {text: expression for text, expression in found.items() if expression is not None}

    def named(self, expression: Expression, node: fx.Node, operands: Iterable[Expression]) -> Expression:
        """The expression of an operation, with attributes in place of numbers.

        An attribute in the statement that led to the operation is what the number was. So is one in another statement
        of the same ``forward``, if no other has its value; a function that ``forward`` calls has whole numbers of its
        own, however.

        Args:
            expression: of the operation.
            node: the operation.
            operands: the parts of the expression that other operations made.
        """
        made = {id(each) for each in operands}
        numbers = dict(self._in_forward)
        if self._source.of_helpers(node):
            numbers = {text: found for text, found in numbers.items() if not text.lstrip("-").isdigit()}
        statements = self._source.of_operation(node)
        if statements and path_of(node)[-1:] and path_of(node)[-1][1] == self._fqn:
            texts = [each.text for each in expression.walk() if isinstance(each, Literal)]
            written = {*_plain_numbers(statements[-1].tree, self._attributes)}
            for value, found, function in _expressions(statements[-1:], self._attributes):
                text = literal(value).text
                # Of `pad(x, (self.dilation, 0)).chunk(2, dim=1)` it is the argument of `pad`, if that is 1 as well.
                is_meant = value not in written or function == _function_name(expression)
                if is_meant and (abs(value) not in _COMMON or texts.count(text) == 1):
                    numbers[text] = found

        def walk(part: Any) -> Any:
            if id(part) in made or (isinstance(part, Argument) and part.is_left_out):
                return part
            found = numbers.get(part.text) if isinstance(part, Literal) and part.is_number else None
            if found is None:
                return part.rebuilt(walk)
            for inner in found.walk():
                if isinstance(inner, Attribute):
                    self.used[inner.name] = literal(self._attributes[inner.name])
            return found

        named: Expression = walk(expression)
        return named


def _numbers(attributes: Mapping[str, object]) -> dict[str, Number]:
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and is_plain(name) and name[0] != "_"
    }


def _expressions(
    statements: Iterable[SourceStatement], attributes: Mapping[str, Number]
) -> Iterator[tuple[Number, Expression, str]]:
    """The parts of statements that are computed from attributes and numbers alone, the whole before its parts, and the
    name of the function that each is an argument of."""
    for statement in statements:
        waiting: list[tuple[ast.AST, str]] = [(statement.tree, "")]
        while waiting:
            node, function = waiting.pop(0)
            found = _evaluated(node, attributes) if isinstance(node, ast.expr) else None
            if found is None:
                called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else function
                parts = ast.iter_child_nodes(node)
                waiting += [(part, function if part is getattr(node, "func", None) else called) for part in parts]
            elif any(isinstance(part, Attribute) for part in found[1].walk()):
                yield *found, function


def _plain_numbers(tree: ast.AST, attributes: Mapping[str, Number]) -> Iterator[Number]:
    """The numbers of a statement that are not computed from attributes."""
    found = _evaluated(tree, attributes) if isinstance(tree, ast.expr) else None
    if found is None:
        for part in ast.iter_child_nodes(tree):
            yield from _plain_numbers(part, attributes)
    elif isinstance(found[1], Literal):
        yield found[0]


def _function_name(expression: Expression) -> str:
    """``pad`` of ``F.pad(…)``, and of a method likewise."""
    return expression.function.text.rpartition(".")[2] if isinstance(expression, FunctionCall) else ""


def _evaluated(node: ast.expr, attributes: Mapping[str, Number]) -> tuple[Number, Expression] | None:
    """The value of an expression of attributes and numbers, and the expression; None for any other."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value, literal(node.value)  # type: ignore[return-value]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return (attributes[node.attr], Attribute(SELF, node.attr)) if node.attr in attributes else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _evaluated(node.operand, attributes)
        if inner is None:
            return None
        return -inner[0], literal(-inner[0]) if isinstance(inner[1], Literal) else unary("-", inner[1])
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        return None
    left, right = _evaluated(node.left, attributes), _evaluated(node.right, attributes)
    if left is None or right is None:
        return None
    symbol, compute = _OPERATORS[type(node.op)]
    try:
        return compute(left[0], right[0]), Binary(symbol, left[1], right[1])
    except ArithmeticError:
        return None
