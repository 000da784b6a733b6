"""The ``forward`` of a class, written until its names and sizes are right."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import sympy
import torch
from torch import fx

from pipegraph.codegen.expressions.module_tree import ModuleTree
from pipegraph.codegen.expressions.operation import common_regions, contexts, express, write
from pipegraph.codegen.expressions.torch_modules import nested_targets
from pipegraph.codegen.forward.items import (
    ClassContents,
    FunctionStep,
    Item,
    ModeBranch,
    ModuleCall,
    ModuleLoop,
    Operation,
    StatementLoop,
    has_effects,
    operands,
    with_inner,
)
from pipegraph.codegen.forward.local_variables import Contexts, DeferredValue, Lists, LocalVariables, indexed_tuples
from pipegraph.codegen.forward.loop_header import LoopHeaders
from pipegraph.codegen.forward.mode_branches import BranchWriter
from pipegraph.codegen.forward.roll_loops import LoopWriter
from pipegraph.codegen.forward.source_numbers import ModuleNumbers
from pipegraph.codegen.forward.statement_loop_writer import StatementLoopWriter, UnrolledLoopError, expanded
from pipegraph.codegen.forward.tensor_attributes import (
    OF_MODEL_DTYPE,
    FixedSizes,
    ModelAttributes,
    ReplacedInputError,
    SizeVariables,
)
from pipegraph.codegen.forward.value_names import ValueNames
from pipegraph.codegen.names.identifiers import relative, unused, variable
from pipegraph.codegen.names.source_loops import SourceLoop
from pipegraph.codegen.names.source_statements import SourceStatements
from pipegraph.codegen.syntax.expressions import Collection, Expression, Name, Subscript, literal
from pipegraph.codegen.syntax.line_breaks import reads_well
from pipegraph.codegen.syntax.statements import Assign, Evaluate, Return, Statement, nested
from pipegraph.graph.aliasing import is_view, is_written
from pipegraph.graph.calls import ModuleValue
from pipegraph.graph.nodes import dynamic_sizes_of
from pipegraph.graph.symbolic_size import SymbolicSize, UnknownSizeError, in_dimensions

# ---- with blocks -----------------------------------------------------------------------------------------------------
# What one ``with`` block holds: neighbours that ran in the same ``no_grad`` and ``autocast`` blocks of the model.


class WithBlocks:
    """Finds the blocks around the items of one class.

    Args:
        contents: the class.
        device: the expression of its device.
    """

    def __init__(self, contents: ClassContents, device: Expression) -> None:
        self._outer, self._device = contents.outer_regions, device
        self._together: dict[Item, tuple[fx.Node, ...]] = {}
        for _, group in groupby(with_inner(contents.items), key=lambda item: common_regions(item.nodes)):
            items = list(group)
            self._together |= dict.fromkeys(items, tuple(node for item in items for node in item.nodes))

    def around(self, item: Item) -> tuple[Expression, ...]:
        """The context managers around an item, outermost first: those that one of its neighbours needs as well."""
        return contexts(self._together.get(item, item.nodes), self._outer, self._device)


# ---- writer ----------------------------------------------------------------------------------------------------------


# The greatest lengths of an expression: of one that contains the expressions of other items, of one that goes inside
# another, of one that was a single statement of the model's source, and of one whose result is only reshaped.
_LONGEST, _FOLDED_LENGTH, _LONGEST_STATEMENT, _RESHAPED_LENGTH = 96, 88, 108, 72


@dataclass(frozen=True)
class WrittenForward:
    """A ``forward``.

    Attributes:
        statements: its statements.
        results: the names of the values that it returns.
        clashes: the names that values did not get because another value had them.
    """

    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    clashes: tuple[str, ...]


class ForwardWriter:
    """The state of writing one ``forward``.

    Args:
        contents, tree, parameters, source, hints: as `write_forward` takes them.
        numbers: writes numbers as the model's source does; None for the class of a stage.
        clashes: names to avoid: a value gets the name of the parameter under which a module takes it instead.
        sizes: those that get a variable as soon as a value has them.
        size_names: sizes of parameters that get a variable at once: (position in ``inputs``, dimension) → its name.
    """

    def __init__(
        self,
        contents: ClassContents,
        tree: ModuleTree,
        parameters: Sequence[str],
        source: SourceStatements | None,
        hints: Mapping[fx.Node, str],
        numbers: ModuleNumbers | None,
        clashes: Container[str],
        sizes: Sequence[sympy.Expr],
        size_names: Mapping[tuple[int, int], str],
    ) -> None:
        self._contents, self._tree = contents, tree
        self._numbers, self._parameters = numbers, parameters
        names = dict(zip(contents.inputs, parameters, strict=True))
        self._names = ValueNames(contents, source, hints, names, clashes) if source is not None else None
        uses = Counter(node for item in contents.items for node in operands(item))
        uses.update(contents.outputs)
        attributes = {node: tree.access(name.split(".")) for node, name in contents.state_names.items()}
        self._values = LocalVariables(self._name, uses, attributes, names)
        self._item_nodes = {node for item in with_inner(contents.items) for node in item.makes}
        self._sizes = SizeVariables(self._values, sizes)
        self._fixed_sizes = FixedSizes(self._values, contents, parameters, source, size_names)
        tensors = [*map(Name, parameters), *attributes.values()]
        self._model = ModelAttributes(self._values, contents, tensors)
        self._device = self._model.device
        self._branches = BranchWriter(self._values, self._name, self._item)
        self._loops = LoopWriter(self._values, contents, tree, source, self._name, self._emit)
        self._lists = Lists(self._values)
        headers = LoopHeaders(self._values, self._lists, tree, self._iterations)
        self._bodies = StatementLoopWriter(self._values, headers, self._lists, contents.inputs, self._name, self._item)
        self._indexed = indexed_tuples(contents.items)
        self._with_blocks = WithBlocks(contents, self._device)

    def write(self) -> WrittenForward:
        """Write the statements; once only.

        Raises:
            UnknownSizeError, UnknownAttributeError: no variable has what an operation names.
            ReplacedInputError: no variable has a parameter any more whose size an operation names.
        """
        self._fixed_sizes.keep()
        for item in self._contents.items:
            self._sizes.keep()
            self._item(item)
        results = self._return()
        self._model.check(statements := nested(self._values.statements))
        return WrittenForward(statements, results, tuple(self._values.clashes))

    def _return(self) -> tuple[str, ...]:
        """Write ``return``; return the names of the results. An expression has the name that its variable would have.

        A single result that the line before assigned is returned as its expression.
        """
        values, outputs = self._values, self._contents.outputs
        for node in outputs:
            if node in values.deferred and values.deferred[node].contexts:
                values.write(node)
        results = [values.expression(node) for node in outputs]
        names: list[str] = []
        for node, result in zip(outputs, results, strict=True):
            used_names = {*names, *(expression.text for expression in results)}
            name = unused(variable(self._names.of_result(node) if self._names else "v", "x"), used_names)
            names.append(result.name if isinstance(result, Name) else name)
        around, last = values.statements[-1] if values.statements else ((), None)
        is_name = len(results) == 1 and isinstance(results[0], Name)
        if self._names and is_name and not around and isinstance(last, Assign) and last.targets == tuple(results):
            values.statements.pop()
            results = [last.value]
        values.statements.append(((), Return(self._lists.with_runs(tuple(results)))))
        return tuple(names)

    # ---- items -----------------------------------------------------------------------------------------------------

    def _item(self, item: Item) -> None:
        if isinstance(item, ModuleLoop):
            self._loops.write(item)
        elif isinstance(item, StatementLoop):
            self._bodies.write(item)
        elif isinstance(item, (ModuleCall, FunctionStep)):
            self._call(item)
        elif isinstance(item, ModeBranch):
            self._branches.write(item)
        else:
            self._operation(item)

    def _operation(self, item: Operation) -> None:
        node = item.node
        if node in self._values.written:  # a part of a tuple that was unpacked
            return
        if "writes" in node.meta:
            self._write(item)
            return
        expression = self._build(item, lambda: self._express(node))
        parts = [user for user in node.users if user.target is operator.getitem and user in self._item_nodes]
        if isinstance(node.meta.get("val"), (tuple, list)) and len(parts) > 1:
            self._unpack(item, expression, parts)
        else:
            self._place(item, node, expression)

    def _express(self, node: fx.Node) -> Expression:
        return self._model.dtype(node) if node.target in OF_MODEL_DTYPE else self._spell(node, express)

    def _spell(self, node: fx.Node, spelled: Callable[..., Any]) -> Any:
        """How an operation is written, with numbers as the source of the model writes them."""
        operands: list[Expression] = []

        def operand(argument: fx.Node | SymbolicSize) -> Expression:
            expression = self._expression(argument)
            operands.extend([expression] if isinstance(argument, fx.Node) else [])
            return expression

        def named(part: Expression) -> Expression:
            part = self._numbers.named(part, node, operands) if self._numbers else part
            return self._fixed_sizes.named(part, node, operands) if self._names else part

        syntax = self._bodies.spell(node, lambda operation, value: spelled(operation, value, self._device), operand)
        return named(syntax) if isinstance(syntax, Expression) else syntax.rebuilt(named)

    def _unpack(self, item: Operation, expression: Expression, parts: Sequence[fx.Node]) -> None:
        """``a, b = x.split(…)``, or ``pieces = x.split(…)`` if a loop goes over them."""
        if item.node in self._indexed:
            element = self._indexed[item.node] or self._name(item, parts[0])
            pieces = Name(self._values.bind(item.node, f"{element}s", expression))
            self._emit(item, Assign((pieces,), expression))
            self._values.written |= {part: Subscript(pieces, (literal(part.args[1]),)) for part in parts}
            return
        by_position = {int(part.args[1]): part for part in parts}  # type: ignore[arg-type]
        targets = [
            self._bind(item, by_position[position], expression) if position in by_position else Name("_")
            for position in range(len(item.node.meta["val"]))
        ]
        self._emit(item, Assign(tuple(targets), expression))

    def _write(self, item: Operation) -> None:
        """Write an operation in place as a statement. Its result is the tensor that it wrote into."""
        node, values, read, around = item.node, self._values, operands(item), self._contexts(item)
        inside = [value for value in read if value in values.deferred and values.deferred[value].contexts == around]
        values.write_all(except_for=inside)
        target = node.kwargs.get("out", node.args[0])
        assert isinstance(target, fx.Node)
        if values.uses_left[node] > 0:
            values.write(target, exempt=inside)
        owner = values.expression(target)
        statement = self._spell(node, write)
        values.consume(read)
        values.written[target] = values.written[node] = owner
        if owner.text in values.variables:
            values.variables[owner.text] = node
        self._emit(item, statement)

    def _call(self, item: ModuleCall | FunctionStep) -> None:
        expression = self._build(item, lambda: self._invocation(item))
        unpacked = item.arguments.unpacked if item.arguments is not None else None
        if len(item.makes) == 1 and unpacked is None:
            self._place(item, item.makes[0], expression)
        else:
            places = range(len(item.makes)) if unpacked is None else unpacked
            uses_left = self._values.uses_left
            names = [self._bind(item, node, expression) if uses_left[node] else Name("_") for node in item.makes]
            self._emit(item, Assign(nested_targets(places, names), expression))

    def _invocation(self, item: ModuleCall | FunctionStep) -> Expression:
        values = list(map(self._expression, item.argument_values))
        if isinstance(item, FunctionStep):
            return item.invocation(values, self._passed)
        return item.invocation(self._bodies.module(item, self._module), values, self._bodies.classes(item))

    def _passed(self, value: object) -> Expression:
        """The expression of an argument of a function, other than a tensor."""
        if isinstance(value, ModuleValue):
            return self._tree.access(value.name.split("."))
        if isinstance(value, SymbolicSize):
            return self._sizes.expression(value)
        if isinstance(value, torch.device):
            return self._device
        return Collection(tuple(map(self._passed, value)), "()") if isinstance(value, tuple) else literal(value)

    def _module(self, called: ModuleCall) -> Expression:
        return self._tree.access(relative(called.fqn, self._contents.prefix).split("."))

    # ---- values ----------------------------------------------------------------------------------------------------

    def _name(self, item: Item, node: fx.Node) -> str:
        name = self._branches.joined.get(node) or self._bodies.names.get(node)
        if name:
            return name
        return self._names.name_of(item, node) if self._names else "v"

    def _expression(self, argument: fx.Node | SymbolicSize) -> Expression:
        """The expression of a value or of a dynamic size."""
        if isinstance(argument, SymbolicSize):
            return self._sizes.expression(argument)
        return self._bodies.varying(argument) or self._values.expression(argument)

    def _iterations(self, loop: SourceLoop, count: int) -> Expression | None:
        """The number of iterations as the source writes it, if it is an attribute."""
        if self._numbers is None or not isinstance(loop.iterable, ast.Call):
            return None
        return self._numbers.in_source(loop.iterable.args[-1], count) if loop.iterable.args else None

    def _build(self, item: Item, build: Callable[[], Expression]) -> Expression:
        """Build the expression of an item. The deferred values that it reads go inside.

        They are written on separate lines if the expression would become too long. If the item has effects, all
        other deferred values are written before it.
        """
        values, read = self._values, operands(item)
        if has_effects(item):
            values.write_all(except_for=read)
        around = self._contexts(item)
        inside = [node for node in values.deferred if node in read]
        if any(values.deferred[node].contexts != around for node in inside):
            for node in inside:
                values.write(node)
        while True:
            inside = [node for node in inside if node in values.deferred]
            expression = build()
            if any(node not in values.deferred for node in inside):  # a size of one was read: it has a variable now
                continue
            parts = [values.deferred[node].item for node in inside if node.target not in OF_MODEL_DTYPE]
            if self._names is None or not parts or self._fits(item, parts, expression):
                values.consume(read)
                return expression
            # A value that has a name in the source reads better on a separate line.
            written = [node for node in inside if node.target not in OF_MODEL_DTYPE]
            for node in [node for node in written if self._names.is_named(node)] or written:
                values.write(node, exempt=read)

    def _fits(self, item: Item, inside: Sequence[Item], expression: Expression) -> bool:
        """Return whether an expression with others inside is short enough."""
        assert self._names is not None
        same_statement = all(self._names.statement(inner_item) == self._names.statement(item) for inner_item in inside)
        line = f"{self._name(item, item.makes[0])} = {expression.text}"
        indent = 4 * (2 + len(self._contexts(item)))  # inside a class
        return len(expression.text) <= (_LONGEST_STATEMENT if same_statement else _LONGEST) and reads_well(line, indent)

    def _place(self, item: Item, node: fx.Node, expression: Expression) -> None:
        """Defer an expression for its only reader, or write it on a line."""
        if self._may_fold(item, node, expression):
            self._values.deferred[node] = DeferredValue(expression, self._contexts(item), item)
        elif self._values.uses_left[node] == 0:
            self._emit(item, Evaluate(expression))
        else:
            self._emit(item, Assign((self._bind(item, node, expression),), expression))

    def _bind(self, item: Item, node: fx.Node, value: Expression) -> Name:
        """A variable for a part of what was just built."""
        return Name(self._values.bind(node, self._name(item, node), value))

    def _may_fold(self, item: Item, node: fx.Node, expression: Expression) -> bool:
        """Return whether a value may go inside the expression of its only reader.

        It may if it has no name in the model's source, or if that name is in use: a name with a number says no more
        than the expression.
        """
        length = len(expression.text)
        if node in self._branches.joined or node in self._bodies.names:
            return False
        if node.target in OF_MODEL_DTYPE or isinstance(expression, Collection):
            return self._values.uses_left[node] == 1
        if not self._names or self._values.uses_left[node] != 1 or length > _FOLDED_LENGTH:
            return False
        if is_written(node) and not is_view(node):  # the reader would write into another tensor
            return False
        if self._names.is_nameless(item, node):
            return True
        if self._names.is_reshaped(node) and length <= _RESHAPED_LENGTH:
            return True
        returned = len(self._contents.outputs) > 1 and node in self._contents.outputs
        return not returned and variable(self._name(item, node), "x") in self._values.used_names()

    def _contexts(self, item: Item) -> Contexts:
        return (*self._branches.around, *self._with_blocks.around(item))

    def _emit(self, item: Item, statement: Statement) -> None:
        self._values.statements.append((self._contexts(item), statement))


# ---- write forward ---------------------------------------------------------------------------------------------------


def write_forward(
    contents: ClassContents,
    tree: ModuleTree,
    parameters: Sequence[str],
    source: SourceStatements | None,
    hints: Mapping[fx.Node, str] | None = None,
    numbers: ModuleNumbers | None = None,
) -> WrittenForward:
    """Write one ``forward``.

    If two values of one name are needed at once, one of them gets another name: the name of the parameter under which a
    module takes it, if that helps, or else one with a number.

    Args:
        contents: the items of the class.
        tree: the modules of the class.
        parameters: the names of the parameters.
        source: finds names and line breaks in the model's source. Without it, every value has a separate line and a
            neutral name, so that two classes of equal structure have equal statements.
        hints: the names of values that the class returns.
        numbers: writes numbers as the model's source does. It keeps the attributes that it wrote.

    Raises:
        UnknownSizeError: no value of the class has a size that an operation names.
    """
    sizes: list[sympy.Expr] = []
    size_names: dict[tuple[int, int], str] = {}
    while True:
        try:
            written = ForwardWriter(
                contents, tree, parameters, source, hints or {}, numbers, (), sizes, size_names
            ).write()
        except ReplacedInputError as error:
            size_names[error.place] = error.name
        except UnknownSizeError as error:
            # Of `(rows - 1) // 2 + 1` no value may have `rows`, and an input the whole, or what it follows from.
            parent = error.parent if error.parent is not None else error.size
            follows = in_dimensions(parent, dynamic_sizes_of(contents.inputs))
            dimensions = follows[1].values() if follows is not None else ()
            requested_size = next(
                (size for size in (error.size, error.parent, *dimensions) if size not in (None, *sizes)), None
            )
            if requested_size is None:
                raise
            sizes.append(requested_size)
        except UnrolledLoopError as error:
            contents = replace(contents, items=tuple(expanded(contents.items, error.loop)))
        else:
            break
    if not written.clashes:
        return written
    try:
        alternative = ForwardWriter(
            contents, tree, parameters, source, hints or {}, numbers, written.clashes, sizes, size_names
        ).write()
    except (UnknownSizeError, ReplacedInputError):
        return written
    return alternative if len(alternative.clashes) < len(written.clashes) else written
