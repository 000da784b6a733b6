"""Numbers as the source of a model writes them: ``self.eps``, ``self.width**-0.5``, ``x.shape[-1] // 2``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from pipegraph.codegen.forward.items import Operation, Step
from pipegraph.codegen.names.identifiers import is_plain
from pipegraph.codegen.names.source_statements import SourceStatements
from pipegraph.codegen.syntax.expressions import (
    SELF,
    Argument,
    Attribute,
    Binary,
    Collection,
    Expression,
    FunctionCall,
    Literal,
    Node,
    Subscript,
    literal,
    unary,
)
from pipegraph.graph.captured import Captured
from pipegraph.graph.model_structure import MODULE_ATTRIBUTES
from pipegraph.graph.nodes import dimensions_of, path_of, shape_of
from pipegraph.graph.tensor_hooks import names_read_by_hook
from pipegraph.torch_private.pytrees import pytree

# ---- computed numbers ------------------------------------------------------------------------------------------------
# Numbers that the source of a model computes: ``self.width // 2`` of a statement, and its value.


Number = int | float
Evaluation = tuple[Number, Expression]
Numbers = Mapping[str, Number]
"""The attributes of a module that are numbers."""

_OPERATORS: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Number]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
}


def computed_numbers(trees: Iterable[ast.AST], attributes: Numbers) -> Iterator[tuple[Number, Expression, str]]:
    """The parts of source that are computed from attributes and numbers alone, the whole before its parts,
    and the name of the function that each is an argument of."""
    for tree in trees:
        waiting: list[tuple[ast.AST, str]] = [(tree, "")]
        while waiting:
            node, function = waiting.pop(0)
            evaluation = evaluated(node, attributes) if isinstance(node, ast.expr) else None
            if evaluation is None:
                called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else function
                parts = ast.iter_child_nodes(node)
                waiting += [(part, function if part is getattr(node, "func", None) else called) for part in parts]
            elif any(isinstance(part, Attribute) for part in evaluation[1].walk()):
                yield *evaluation, function


def plain_numbers(tree: ast.AST, attributes: Numbers) -> Iterator[Number]:
    """The numbers of a statement that are computed from no others, and are not all dimensions of a call."""
    evaluation = evaluated(tree, attributes) if isinstance(tree, ast.expr) else None
    if evaluation is None:
        match tree:
            case ast.Call(func=ast.Attribute(value=owner, attr="permute" | "transpose")):
                yield from plain_numbers(owner, attributes)
                return
        for part in ast.iter_child_nodes(tree):
            yield from plain_numbers(part, attributes)
    elif isinstance(evaluation[1], Literal):
        yield evaluation[0]


def evaluated(
    node: ast.expr, attributes: Numbers, variable: Callable[[ast.expr], Evaluation | None] = lambda node: None
) -> Evaluation | None:
    """The value of an expression of numbers and attributes, and the expression; None for any other.

    Args:
        node: the expression in the source.
        attributes: of the module.
        variable: returns the same for other expressions that have a number.
    """
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value, literal(node.value)  # type: ignore[return-value]
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in attributes:
            return attributes[name], Attribute(SELF, name)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = evaluated(node.operand, attributes, variable)
        if inner is None:
            return None
        return -inner[0], literal(-inner[0]) if isinstance(inner[1], Literal) else unary("-", inner[1])
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        return variable(node)
    left_operand, right = evaluated(node.left, attributes, variable), evaluated(node.right, attributes, variable)
    if left_operand is None or right is None:
        return None
    symbol, compute = _OPERATORS[type(node.op)]
    try:
        return compute(left_operand[0], right[0]), Binary(symbol, left_operand[1], right[1])
    except ArithmeticError:
        return None


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


# ---- source numbers --------------------------------------------------------------------------------------------------


# These stand in many expressions that have nothing to do with an attribute of the same value.
_COMMON = (0, 0.5, 1, 2)

_RESHAPES = ("view", "reshape", "unflatten")


def fixed_sizes(
    items: Iterable[Step], inputs: Sequence[fx.Node], source: SourceStatements
) -> dict[fx.Node, dict[int, tuple[int, int]]]:
    """The numbers that are sizes in the model's source, of inputs in which they never vary: as for `ClassContents`.

    A model that runs over time steps in Python fixes their number, and says ``x[:, :length]`` all the same.
    """
    input_sizes: dict[tuple[int, int], tuple[int, int]] = {}
    for position, node in enumerate(inputs):
        for dim, size in enumerate(shape_of(node) if isinstance(node.meta.get("val"), Tensor) else ()):
            if type(size) is int and size not in _COMMON:
                input_sizes.setdefault((size, dim), (position, dim))
    node_sizes: dict[fx.Node, dict[int, tuple[int, int]]] = {}
    for node in (item.node for item in items if isinstance(item, Operation)):
        numbers = {leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if type(leaf) is int}
        numbers -= dimensions_of(node)
        if not any(size in numbers for size, _ in input_sizes):
            continue
        dims = source.dimensions_mentioned(node)
        sizes: dict[int, tuple[int, int]] = {}
        for (size, dim), place in input_sizes.items():
            if dim in dims and size in numbers:
                sizes.setdefault(size, place)
        if sizes:
            node_sizes[node] = sizes
    return node_sizes


def with_fixed_sizes(
    expression: Expression, operands: Iterable[Expression], sizes: Mapping[int, Expression]
) -> Expression:
    """The expression of an operation with sizes in place of numbers, except in the parts that other operations made."""
    return _replaced(expression, operands, {literal(size).text: replacement for size, replacement in sizes.items()})


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
        # A constant of ``forward`` may have the name of an attribute, and a class can only have one of them.
        names = {name for name in vars(module) if (f"{fqn}.{name}" if fqn else name) in captured.state}
        self._attributes = {name: value for name, value in attribute_numbers(vars(module)).items() if name not in names}

    def named(self, expression: Expression, node: fx.Node, operands: Iterable[Expression]) -> Expression:
        """The expression of an operation, with attributes in place of numbers.

        An attribute replaces a number only if the innermost statement that led to the operation reads the attribute: a
        statement of ``forward``, or of a method that it calls. Functions of torch are passed what that statement reads.

        Args:
            expression: of the operation.
            node: the operation.
            operands: the parts of the expression that other operations made.
        """
        helpers = (statement for statement in self._source.of_helpers(node) if statement.file != F.__file__)
        statements = (*self._source.of_operation(node), *helpers)
        if not statements or not path_of(node)[-1:] or path_of(node)[-1][1] != self._fqn:
            return expression
        tree = statements[-1].tree
        dims = {literal(dim).text for dim in dimensions_of(node)}
        expression = _with_computed_size_open(expression, node, tree, self._attributes)
        numbers = _in_statement(tree, expression, operands, self._attributes)
        numbers = {text: number for text, number in numbers.items() if text not in dims}
        for statement in statements[-2::-1]:  # a fraction that a function of a library was passed
            outer = _in_statement(statement.tree, expression, operands, self._attributes)
            numbers |= {text: number for text, number in outer.items() if "." in text and text not in numbers}
        for name in names_read_by_hook(node.target):  # as the hook names them: self.factor of self.factor * 0.1
            if name in self._attributes:
                numbers[literal(self._attributes[name]).text] = Attribute(SELF, name)
        return _replaced(expression, operands, numbers, self._use)

    def in_source(self, tree: ast.expr, number: int) -> Expression | None:
        """An expression of the source, if it equals this number and has an attribute in it; None otherwise."""
        evaluation = evaluated(tree, self._attributes)
        if evaluation is None or evaluation[0] != number or isinstance(evaluation[1], Literal):
            return None
        self._use(evaluation[1])
        return evaluation[1]

    def _use(self, expression: Expression) -> None:
        for inner in expression.walk():
            if isinstance(inner, Attribute) and inner.owner == SELF and inner.name in self._attributes:
                self.used[inner.name] = literal(self._attributes[inner.name])


def _replaced(
    expression: Expression,
    operands: Iterable[Expression],
    numbers: Mapping[str, Expression],
    use: Callable[[Expression], None] = lambda replacement: None,
) -> Expression:
    """An expression with others in place of its numbers, except in the parts that other operations made."""
    operand_ids = {id(operand) for operand in operands}
    dims = {id(dim) for part in expression.walk() for dim in _dimensions(part)}

    def walk(part: Any) -> Any:
        if id(part) in operand_ids or id(part) in dims or (isinstance(part, Argument) and part.is_left_out):
            return part
        replacement = numbers.get(part.text) if isinstance(part, Literal) and part.is_number else None
        if replacement is None:
            return part.rebuilt(walk)
        use(replacement)
        return replacement

    named: Expression = walk(expression)
    return named


def _dimensions(part: Node) -> Sequence[Node]:
    """The numbers that name dimensions: those of ``x.flatten(1, 3)`` and ``x.shape[1]``, and the first of
    ``x.unflatten(1, (3, 4))``."""
    if isinstance(part, Subscript) and isinstance(part.owner, Attribute) and part.owner.name == "shape":
        return part.indices
    if not isinstance(part, FunctionCall) or not isinstance(part.function, Attribute):
        return ()
    count = {"flatten": 2, "unflatten": 1}.get(part.function.name, 0)
    return [argument.value for argument in part.arguments[:count]]


def _in_statement(
    tree: ast.AST, expression: Expression, operands: Iterable[Expression], attributes: Numbers
) -> dict[str, Expression]:
    """The numbers that a statement computes from attributes → how it writes them."""
    numbers: dict[str, Expression] = {}
    texts = list(_literals(expression, {id(operand) for operand in operands}))
    written = {*plain_numbers(tree, attributes)}
    for value, replacement, function in computed_numbers([tree], attributes):
        text = literal(value).text
        # Of `pad(x, (self.dilation, 0)).chunk(2, dim=1)` it is the argument of `pad`, if that is 1 as well.
        is_meant = value not in written or function == _function_name(expression)
        if is_meant and (abs(value) not in _COMMON or texts.count(text) == 1):
            numbers[text] = replacement
    return numbers


def _literals(node: Node, operands: Set[int]) -> Iterator[str]:
    """The literals of an expression, except those in the parts that other operations made, which have these ids."""
    if isinstance(node, Literal):
        yield node.text
    for part in node.parts():
        if id(part) not in operands:
            yield from _literals(part, operands)


def _with_computed_size_open(expression: Expression, node: fx.Node, tree: ast.AST, attributes: Numbers) -> Expression:
    """``x.unflatten(-1, (3, self.heads, -1))`` where the source says ``x.view(…, 3, self.heads, width // self.heads)``:
    of the sizes that a dimension is split in, the one that is left open is the one that nothing else says. A size that
    the source leaves open stays open."""
    match expression:
        case FunctionCall(
            function=Attribute(name="unflatten"),
            arguments=(dim, Argument(value=Collection(items=sizes) as split) as sizes_argument),
        ):
            first = int(dim.value.text) % len(shape_of(node.args[0]))
        case _:
            return expression
    requested_sizes = node.args[-1]
    if isinstance(requested_sizes, Sequence) and -1 in requested_sizes:
        return expression
    numbers = shape_of(node)[first : first + len(sizes)]
    given_sizes = _sizes_of_reshapes(tree)
    source_numbers = {number for size in given_sizes for number in plain_numbers(size, attributes)}
    source_numbers |= {value for value, _, _ in computed_numbers(given_sizes, attributes)}
    unsaid = [at for at, number in enumerate(numbers) if number not in source_numbers]
    opened = [at for at, size in enumerate(sizes) if size == literal(-1)]
    if len(unsaid) != 1 or len(opened) != 1 or opened == unsaid or any(type(number) is not int for number in numbers):
        return expression
    items = tuple(literal(-1) if [at] == unsaid else literal(number) for at, number in enumerate(numbers))
    return replace(expression, arguments=(dim, sizes_argument.changed(replace(split, items=items))))


def _sizes_of_reshapes(tree: ast.AST) -> list[ast.expr]:
    """The arguments of a statement's reshapes: ``.transpose(1, 2)`` after them says no size."""
    return [
        argument
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _RESHAPES
        for argument in (*call.args, *(keyword.value for keyword in call.keywords))
    ]


def _function_name(expression: Expression) -> str:
    """``pad`` of ``F.pad(…)``, and of a method likewise."""
    return expression.function.text.rpartition(".")[2] if isinstance(expression, FunctionCall) else ""
