"""The sizes of a model's inputs that vary, what an exported program computes from them, and a graph at others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from torch.export import ExportedProgram

from pipegraph.errors import CaptureError
from pipegraph.graph.export.dynamic_shapes import BATCH, USUAL_NAMES, SizeNames, WantedSizes
from pipegraph.graph.export.fractions import has_fraction
from pipegraph.graph.export.shape_expression_limit import FixedSizeNeededError
from pipegraph.graph.export.size_guards import SizeGuards, same_sizes
from pipegraph.graph.export.torch_export import Exported
from pipegraph.graph.nodes import SIZES
from pipegraph.graph.symbolic_size import (
    LONGEST_TEXT,
    OPERATORS,
    ROUNDINGS,
    TO_FLOAT,
    FixedSize,
    InputDimension,
    SymbolicSize,
    expression_text,
)
from pipegraph.torch_private.export import guards_of, symbolic_expression
from pipegraph.torch_private.fake_tensors import fake_empty
from pipegraph.torch_private.pytrees import pytree


class InputSizes:
    """The dynamic sizes in an exported program.

    The first dimension of the first tensor is called ``batch``, others by the input and the dimension: ``tokens_1``.

    Args:
        exported: the program.
        size_names: other names. Dimensions of one name are one size.

    Raises:
        CaptureError: dimensions of one name have different sizes in the example.
    """

    def __init__(self, exported: ExportedProgram, size_names: SizeNames = USUAL_NAMES) -> None:
        names = size_names.by_dimension
        inputs = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
        values = {node.name: node.meta.get("val") for node in exported.graph.find_nodes(op="placeholder")}
        self._names: dict[sympy.Expr, sympy.Symbol] = {}
        self._captured: dict[sympy.Symbol, int] = {}
        self._places: dict[sympy.Symbol, set[InputDimension]] = {}
        self._strides: dict[sympy.Expr, sympy.Integer] = {}
        self._equal: dict[sympy.Expr, sympy.Expr] = {}
        examples = pytree.tree_leaves(exported.example_inputs)
        tensors = (value for value in values.values() if isinstance(value, torch.Tensor))
        self._shapes: list[list[sympy.Expr]] = []  # of each leaf of the inputs
        self._inputs = inputs
        self._guards = next((guards for guards in map(guards_of, tensors) if guards), [])
        first = next((name for name in inputs if isinstance(values[name], torch.Tensor)), None)
        equal_symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        if not size_names.by_user:  # else the user says which sizes are the same
            equal_symbols = same_sizes(self._guards, _varying(map(values.get, inputs), examples))
        named: dict[str, sympy.Symbol] = {}
        for position, (name, example) in enumerate(zip(inputs, examples, strict=True)):
            sizes = values[name].shape if isinstance(values[name], torch.Tensor) else ()
            expressions = [symbolic_expression(size) if is_symbolic(size) else sympy.Integer(size) for size in sizes]
            for dim, expression in enumerate(expressions):
                if isinstance(expression, sympy.Symbol) and expression not in self._names:
                    is_batch = dim == 0 and name == first and BATCH not in names.values()
                    usual = BATCH if is_batch else f"{name}_{dim}"
                    size_name = names.get((position, dim))
                    symbol = named.get(size_name) if size_name else self._names.get(equal_symbols.get(expression))
                    if symbol is None:
                        symbol = self._symbol(size_name or usual, dim)
                    elif self._captured[symbol] != example.shape[dim]:
                        raise CaptureError(
                            f"{name}.shape[{dim}] is {example.shape[dim]}, and another input has {symbol} "
                            f"{self._captured[symbol]}: dimensions of one name are one size.",
                            "an example in which they are equal, or two names.",
                        )
                    named |= {size_name: symbol} if size_name else {}
                    self._names[expression] = symbol
                    self._captured[symbol] = example.shape[dim]
                self._learn_stride(values[name].stride()[dim], example.stride()[dim])
                for symbol in expression.xreplace(self._names).free_symbols:
                    self._places.setdefault(symbol, set()).add((position, dim))
            self._shapes.append(expressions)

    def _learn_stride(self, stride: Any, captured: int) -> None:
        """Learn a stride of an input that follows from no size: that of a dimension of size 1."""
        if is_symbolic(stride) and symbolic_expression(stride).is_Symbol:
            self._strides.setdefault(symbolic_expression(stride), sympy.Integer(captured))

    def _symbol(self, name: str, dim: int) -> sympy.Symbol:
        """A symbol for the size of an input's dimension, under a name that Python takes and no other one has."""
        label = name if name.isidentifier() and name.isascii() else f"input_{dim}"
        while sympy.Symbol(label, integer=True, positive=True) in self._captured:
            label += "_"
        return sympy.Symbol(label, integer=True, positive=True)

    @property
    def captured(self) -> dict[str, int]:
        """Size → its number in the example."""
        return {str(symbol): number for symbol, number in self._captured.items()}

    def position_of(self, name: str) -> int:
        """The position of an input among the leaves of the arguments."""
        return self._inputs.index(name)

    def fixed(self) -> Iterator[tuple[str, InputDimension, int]]:
        """The sizes of inputs that do not vary: (input, dimension, size)."""
        for position, (name, shape) in enumerate(zip(self._inputs, self._shapes, strict=True)):
            yield from ((name, (position, dim), int(size)) for dim, size in enumerate(shape) if size.is_Integer)

    def symbol_of(self, dimension: InputDimension) -> sympy.Symbol | None:
        """The symbol of an input's dimension; None if it does not vary, or is an expression of others."""
        position, dim = dimension
        shape = self._shapes[position]
        return self._names.get(shape[dim]) if dim < len(shape) else None

    def values_in(self, example: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[sympy.Symbol, int]:
        """The dynamic sizes, as they are in other arguments, positional ones and those by keyword."""
        leaves = pytree.tree_leaves(example)
        return {
            self._names[size]: leaves[position].shape[dim]
            for position, shape in enumerate(self._shapes)
            for dim, size in enumerate(shape)
            if size in self._names
        }

    @property
    def vary(self) -> bool:
        """Whether any size varies."""
        return bool(self._names)

    def learn_equal(self, size: Any, expression: sympy.Expr) -> None:
        """Learn what a size is equal to."""
        if is_symbolic(size):
            self._equal[symbolic_expression(size).xreplace(self._names)] = sympy.expand(expression)

    def expression(self, value: Any) -> sympy.Expr:
        """A number of the program, in symbols for the dynamic sizes."""
        return self._renamed(value) if is_symbolic(value) else sympy.sympify(value)

    def learn(self, shape: Sequence[Any], requested_sizes: Sequence[Any]) -> None:
        """Learn what sizes are equal to from a reshape: in its result they may be a quotient, ``s // (s // 2)``, where
        the reshape asked for 2.

        Args:
            shape: of the result, as the program has it.
            requested_sizes: the sizes that the reshape was given for it, −1 for an open one.
        """
        for size, requested_size in zip(shape, requested_sizes, strict=False):
            if is_symbolic(size) and type(requested_size) is int and requested_size > 0:
                expression = symbolic_expression(size).xreplace(self._names)
                if not expression.is_Symbol:
                    self._equal[expression] = sympy.Integer(requested_size)

    def number(self, value: Any) -> int:
        """A size of the program, which may be a symbolic number.

        Raises:
            FixedSizeNeededError: it depends on more than the sizes of inputs, or a package cannot hold its expression.
        """
        if not is_symbolic(value):
            return int(value)
        renamed = self._renamed(value)
        if not renamed.free_symbols <= self._captured.keys():
            raise self.fixed_size_needed(value)
        if too_complex := _too_complex(renamed):
            raise self._fixed_size_needed(too_complex)
        size = SymbolicSize(renamed, self._captured)
        if not size.symbols:
            return int(size)
        if len(size.text) > LONGEST_TEXT:
            raise self._fixed_size_needed(renamed.free_symbols)
        return size

    def fixed_size_needed(self, value: Any) -> FixedSizeNeededError:
        """The error that names the dimensions from which a symbolic number follows; all, if it depends on more."""
        renamed = self._renamed(value)
        return self._fixed_size_needed(_too_complex(renamed) or renamed.free_symbols)

    def _fixed_size_needed(self, symbols: AbstractSet[sympy.Symbol]) -> FixedSizeNeededError:
        if not symbols <= self._places.keys():
            symbols = self._places.keys()
        return FixedSizeNeededError(frozenset(place for symbol in symbols for place in self._places[symbol]))

    def constant(self, value: Any) -> float | None:
        """A fraction or truth value that is computed from sizes which do not vary; None for any other."""
        renamed = self._renamed(value)
        if renamed.free_symbols:
            return None
        return bool(renamed) if isinstance(value, torch.SymBool) else float(renamed)

    def guards(self, also: Iterable[sympy.Basic] = ()) -> SizeGuards:
        """What the program takes for granted of the sizes.

        Args:
            also: relations that the program does not say, in its sizes' own symbols.

        Raises:
            FixedSizeNeededError: a package cannot hold what is taken for granted.
        """
        # A guard on a stride is about the memory of the example, which is another one in every microbatch.
        strides = self._strides.keys() - self._names.keys()
        of_sizes = (guard for guard in self._guards if not guard.free_symbols & strides)
        relations = (guard.xreplace(self._names).xreplace(self._equal) for guard in of_sizes)
        guards = SizeGuards(self._captured, (*relations, *also))
        for relation in (*guards.required, *guards.assumed):
            if any(map(has_fraction, relation.args)):
                raise self._fixed_size_needed(relation.free_symbols)
        for relation in guards.required:
            if not isinstance(relation, Relational):
                raise self._fixed_size_needed(relation.free_symbols)
            if too_complex := {symbol for side in relation.args for symbol in _too_complex(side)}:
                raise self._fixed_size_needed(too_complex)
            is_too_long = sum(len(expression_text(side)) for side in relation.args) > LONGEST_TEXT - len(" == ")
            if is_too_long or (isinstance(relation, sympy.Eq) and _is_determined(relation)):
                raise self._fixed_size_needed(relation.free_symbols)
        return guards

    def arguments_at(
        self, sizes: Mapping[sympy.Symbol, int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of the example with other sizes, and any values."""
        numbers = {symbol: sympy.Integer(size) for symbol, size in {**self._captured, **sizes}.items()}

        def at(position: int, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.new_empty(
                [int(size.xreplace(self._names).xreplace(numbers)) for size in self._shapes[position]]
            )

        leaves, form = pytree.tree_flatten((args, kwargs))
        arguments: tuple[tuple[Any, ...], dict[str, Any]]
        arguments = pytree.tree_unflatten([at(position, leaf) for position, leaf in enumerate(leaves)], form)
        return arguments

    def describe(self, value: Any) -> dict[str, Any]:
        """The metadata of a value: with its sizes as numbers, and as `SymbolicSize`s."""
        if not isinstance(value, torch.Tensor):
            return {"val": pytree.tree_map_only(torch.Tensor, self._concrete, value)}
        return {"val": self._concrete(value), SIZES: tuple(map(self.number, value.shape))}

    def _concrete(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor with the sizes and strides that another one has for the example."""
        if not any(map(is_symbolic, (*tensor.shape, *tensor.stride()))):
            return tensor
        sizes, strides = (list(map(self._at_capture, numbers)) for numbers in (tensor.shape, tensor.stride()))
        return fake_empty(tensor, sizes, tensor.dtype, strides).requires_grad_(tensor.requires_grad)

    def _renamed(self, value: Any) -> sympy.Expr:
        return symbolic_expression(value).xreplace(self._names).xreplace(self._equal)

    def _at_capture(self, value: Any) -> int:
        if not is_symbolic(value):
            return int(value)
        renamed = self._renamed(value).xreplace(self._strides)
        if not renamed.free_symbols <= self._captured.keys():
            raise self.fixed_size_needed(value)
        return int(renamed.xreplace({symbol: sympy.Integer(size) for symbol, size in self._captured.items()}))


def _varying(values: Iterable[Any], examples: Iterable[Any]) -> Iterator[tuple[sympy.Symbol, int, int]]:
    """(Symbol, dimension, size in the example) of the sizes of inputs that vary, in the order of the inputs; the first
    dimension of the first tensor is first, if that varies."""
    for value, example in zip(values, examples, strict=True):
        shape: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
        for dim, size in enumerate(shape):
            if is_symbolic(size) and symbolic_expression(size).is_Symbol:
                yield symbolic_expression(size), dim, example.shape[dim]


def is_symbolic(value: Any) -> bool:
    """Return whether a value is a number that depends on sizes."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_determined(relation: sympy.Eq) -> bool:
    """Return whether an equation has one solution: ``16 * channels == 48``, ``int(0.5 * length) == 6``."""
    fractions = {*ROUNDINGS, TO_FLOAT}
    has_fraction = any(type(part).__name__ in fractions for part in sympy.preorder_traversal(relation))
    if has_fraction and any(side.is_number for side in relation.args):
        return True
    difference, symbols = relation.lhs - relation.rhs, relation.free_symbols
    return len(symbols) == 1 and difference.is_polynomial(*symbols) and sympy.degree(difference, *symbols) == 1


def _too_complex(expression: sympy.Basic) -> set[sympy.Symbol]:
    """The symbols in the parts of an expression that a package cannot hold: of ``batch * (n + 1) ** 0.5`` only ``n``.
    With numbers for them it can hold the rest."""
    parts = (part for part in sympy.preorder_traversal(expression) if not _is_simple(part))
    return {symbol for part in parts for symbol in part.free_symbols}


def _is_simple(part: sympy.Basic) -> bool:
    if isinstance(part, sympy.Pow):
        return bool(part.exp.is_Integer and part.exp.is_positive)
    if isinstance(part, (sympy.Add, sympy.Mul, sympy.Integer, sympy.Float, sympy.Symbol)):
        return True
    return type(part).__name__ in {*OPERATORS, *ROUNDINGS, TO_FLOAT}


def fixed_sizes(
    exported: Exported, sizes: InputSizes, request: WantedSizes
) -> Iterator[tuple[InputDimension, FixedSize]]:
    """The sizes of inputs that do not vary.

    Args:
        exported: the program.
        sizes: of its inputs.
        request: what the user says of them.
    """
    for name, (position, dim), size in sizes.fixed():
        line = exported.lines.get(f"L['{name}'].size()[{dim}]", "")
        if (position, dim) in request.fixed_rows:
            reason = "the model fixes the rows of another input"
        elif request.fixed is None or (position, dim) in request.fixed:
            reason = "dynamic_shapes fixes it"
        elif size < 2:
            reason = "the example has no more, and 1 may stand for a size that is broadcast; capture 2 or more"
        elif exported.fixed is None:
            reason = f"no size varies: {exported.obstacle}"
        elif exported.obstacle and (position, dim) in exported.fixed and (position, dim) not in exported.computed:
            reason = f"no size but the batch varies: {exported.obstacle}"
        elif (position, dim) in exported.fixed:
            reason = "the model fixes it, or computes from it what a stage cannot express"
        else:
            reason = "the model fixes it"
        line = exported.computed.get((position, dim), line)
        fixed_by_model = (
            size > 1 and exported.fixed is not None and (request.fixed is None or (position, dim) not in request.fixed)
        )
        yield (position, dim), FixedSize(f"{name}.shape[{dim}]", size, line if fixed_by_model else "", reason)
