"""Numbers as the source of a model writes them: ``self.eps``, ``self.width**-0.5``, ``x.shape[-1] // 2``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from pipegraph.codegen.forward.items import Operation, Step
from pipegraph.codegen.names.identifiers import is_plain
from pipegraph.codegen.names.source_statements import SourceStatement, SourceStatements, size_read
from pipegraph.codegen.syntax.expressions import (
    SELF,
    Argument,
    Attribute,
    Binary,
    Collection,
    Expression,
    FunctionCall,
    Literal,
    Name,
    Node,
    Subscript,
    literal,
    unary,
)
from pipegraph.graph.captured import Captured, StateEntry
from pipegraph.graph.model_structure import MODULE_ATTRIBUTES
from pipegraph.graph.nodes import dimensions_of, path_of, shape_of
from pipegraph.torch_private.pytrees import pytree

# ---- computed numbers ------------------------------------------------------------------------------------------------
# Numbers that the source of a model computes: ``self.width // 2`` of a statement, and its value.


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
    """The numbers of a statement that are computed from no others, and are not all dimensions of a call."""
    evaluation = evaluated(tree, read) if isinstance(tree, ast.expr) else None
    if evaluation is None:
        match tree:
            case ast.Call(func=ast.Attribute(value=owner, attr="permute" | "transpose")):
                yield from plain_numbers(owner, read)
                return
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
        places: dict[int, list[tuple[int, int]]] = {}
        for (size, dim), place in input_sizes.items():
            if dim in dims and size in numbers:
                places.setdefault(size, []).append(place)
        sizes = {size: candidates[0] for size, candidates in places.items() if len(candidates) == 1}
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
        state: the parameters and buffers of its class.

    Attributes:
        used: the attributes that were written → their values.
    """

    def __init__(self, captured: Captured, source: SourceStatements, fqn: str, state: Mapping[str, StateEntry]) -> None:
        # A parameter may be divided between ranks, and then its shape differs between them.
        self._shapes = {name: entry.shape for name, entry in state.items() if entry.kind != "parameter"}
        self.used: dict[str, Expression] = {}
        self._source = source
        self._fqn = fqn
        module = captured.modules[fqn].module
        # A constant of ``forward`` may have the name of an attribute, and a class can only have one of them.
        names = {name for name in vars(module) if (f"{fqn}.{name}" if fqn else name) in captured.state}
        self._attributes = {name: value for name, value in attribute_numbers(vars(module)).items() if name not in names}

    def named(
        self,
        expression: Expression,
        node: fx.Node,
        operands: Iterable[Expression],
        variables: Mapping[str, fx.Node],
    ) -> Expression:
        """The expression of an operation, with attributes in place of numbers.

        An attribute replaces a number only if the innermost statement that led to the operation reads the attribute: a
        statement of ``forward``, or of a method that it calls. Functions of torch are passed what that statement reads.

        Args:
            expression: of the operation.
            node: the operation.
            operands: the parts of the expression that other operations made.
            variables: variable → the value in it now.
        """
        helpers = (statement for statement in self._source.of_helpers(node) if statement.file != F.__file__)
        statements = (*self._source.of_operation(node), *helpers)
        if not statements or not path_of(node)[-1:] or path_of(node)[-1][1] != self._fqn:
            return expression
        statement, of_module = statements[-1], partial(_of_module, self._attributes)
        dims = {literal(dim).text for dim in dimensions_of(node)}

        def replaced(expression: Expression, read: Read) -> Expression:
            numbers = _in_statement(statement, expression, read)
            numbers = {text: number for text, number in numbers.items() if text not in dims}
            return _replaced(expression, operands, numbers, self._use)

        of_sizes = partial(_size_or, of_module, self._source.sizes_assigned(node), self._shapes, variables)
        with_attributes = replaced(_with_computed_size_open(expression, node, statement, of_module), of_module)
        return replaced(with_attributes, of_sizes)

    def in_source(self, tree: ast.expr, number: int) -> Expression | None:
        """An expression of the source, if it equals this number and has an attribute in it; None otherwise."""
        evaluation = evaluated(tree, partial(_of_module, self._attributes))
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


def _in_statement(statement: SourceStatement, expression: Expression, read: Read) -> dict[str, Expression]:
    """The numbers that a statement computes from what ``read`` knows → how it writes them."""
    numbers: dict[str, Expression] = {}
    texts = [part.text for part in expression.walk() if isinstance(part, Literal)]
    written = {*plain_numbers(statement.tree, read)}
    for value, replacement, function in computed_numbers([statement], read):
        text = literal(value).text
        # Of `pad(x, (self.dilation, 0)).chunk(2, dim=1)` it is the argument of `pad`, if that is 1 as well.
        is_meant = value not in written or function == _function_name(expression)
        if is_meant and (abs(value) not in _COMMON or texts.count(text) == 1):
            numbers[text] = replacement
    return numbers


def _of_module(attributes: Mapping[str, Number], node: ast.expr) -> Evaluation | None:
    """``self.eps``."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in attributes:
            return attributes[name], Attribute(SELF, name)
    return None


def _size_or(
    fallback: Read,
    assigned: Mapping[str, tuple[str, int]],
    shapes: Mapping[str, Sequence[int]],
    variables: Mapping[str, fx.Node],
    node: ast.expr,
) -> Evaluation | None:
    """``x.shape[2]``, also for ``c`` after ``b, t, c = x.shape``, or ``self.table.shape[0]`` of a buffer, if the size
    does not vary; else what ``fallback`` reads."""
    match size_read(node) or node:
        case (ast.Name(id=owner), int(dim)):
            return known_size(Name(owner), variables.get(owner), dim)
        case (ast.Attribute(value=ast.Name(id="self"), attr=name), int(dim)):
            return known_size(Attribute(SELF, name), shapes.get(name), dim)
        case ast.Name(id=name) if name in assigned:
            owner, dim = assigned[name]
            return known_size(Name(owner), variables.get(owner), dim)
    return fallback(node)


def _with_computed_size_open(
    expression: Expression, node: fx.Node, statement: SourceStatement, read: Read
) -> Expression:
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
    given_sizes = [replace(statement, tree=tree) for tree in _sizes_of_reshapes(statement.tree)]
    source_numbers = {number for size_statement in given_sizes for number in plain_numbers(size_statement.tree, read)}
    source_numbers |= {value for value, _, _ in computed_numbers(given_sizes, read)}
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
