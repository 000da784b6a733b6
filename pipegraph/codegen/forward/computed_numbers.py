"""Numbers that the source of a model computes: ``self.width // 2`` of a statement, and its value."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from pipegraph.codegen.names.identifiers import is_plain
from pipegraph.codegen.names.source_statements import SourceStatement
from pipegraph.codegen.syntax.expressions import Attribute, Binary, Expression, Literal, Subscript, literal, unary
from pipegraph.graph.model_structure import MODULE_ATTRIBUTES
from pipegraph.graph.nodes import shape_of

Number = int | float
Evaluation = tuple[Number, Expression]
Read = Callable[[ast.expr], Evaluation | None]
"""An expression of the source → its value, and how it is written; None for any other."""

_OPERATORS: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Number]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
}


def computed_numbers(statements: Iterable[SourceStatement], read: Read) -> Iterator[tuple[Number, Expression, str]]:
    """The parts of statements that are computed from what ``read`` knows and numbers alone, the whole before its parts,
    and the name of the function that each is an argument of."""
    for statement in statements:
        waiting: list[tuple[ast.AST, str]] = [(statement.tree, "")]
        while waiting:
            node, function = waiting.pop(0)
            evaluation = evaluated(node, read) if isinstance(node, ast.expr) else None
            if evaluation is None:
                called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else function
                parts = ast.iter_child_nodes(node)
                waiting += [(part, function if part is getattr(node, "func", None) else called) for part in parts]
            elif any(isinstance(part, Attribute) for part in evaluation[1].walk()):
                yield *evaluation, function


def plain_numbers(tree: ast.AST, read: Read) -> Iterator[Number]:
    """The numbers of a statement that are computed from no others."""
    evaluation = evaluated(tree, read) if isinstance(tree, ast.expr) else None
    if evaluation is None:
        for part in ast.iter_child_nodes(tree):
            yield from plain_numbers(part, read)
    elif isinstance(evaluation[1], Literal):
        yield evaluation[0]


def evaluated(node: ast.expr, read: Read) -> Evaluation | None:
    """The value of an expression of numbers and of what ``read`` knows, and the expression; None for any other."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value, literal(node.value)  # type: ignore[return-value]
    evaluation = read(node)
    if evaluation is not None:
        return evaluation
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = evaluated(node.operand, read)
        if inner is None:
            return None
        return -inner[0], literal(-inner[0]) if isinstance(inner[1], Literal) else unary("-", inner[1])
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        return None
    left_operand, right = evaluated(node.left, read), evaluated(node.right, read)
    if left_operand is None or right is None:
        return None
    symbol, compute = _OPERATORS[type(node.op)]
    try:
        return compute(left_operand[0], right[0]), Binary(symbol, left_operand[1], right[1])
    except ArithmeticError:
        return None


def known_size(owner: Expression, tensor: fx.Node | Sequence[int] | None, dim: int) -> Evaluation | None:
    """``owner.shape[dim]`` of a tensor, or of one with these sizes; None if there is no such size, or it varies."""
    if isinstance(tensor, fx.Node):
        tensor = shape_of(tensor) if isinstance(tensor.meta.get("val"), Tensor) else ()
    if tensor is None or not -len(tensor) <= dim < len(tensor) or type(tensor[dim]) is not int:
        return None
    return tensor[dim], Subscript(Attribute(owner, "shape"), (literal(dim),))


def attribute_numbers(attributes: Mapping[str, object]) -> dict[str, Number]:
    """Those attributes of a module that are numbers of the model's own."""
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, (int, float))
        and not isinstance(value, bool)
        and is_plain(name)
        and name[0] != "_"
        and name not in MODULE_ATTRIBUTES
    }
