"""What a ``forward`` asks of its tensors: dynamic sizes, ``x.shape[1]``, and the model's dtype, ``x.dtype``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import sympy
from torch import fx

from pipegraph.codegen.forward.items import ClassContents
from pipegraph.codegen.forward.local_variables import LocalVariables
from pipegraph.codegen.forward.source_numbers import with_fixed_sizes
from pipegraph.codegen.names.source_statements import SourceStatements
from pipegraph.codegen.syntax.expressions import Attribute, Binary, Expression, Name, Subscript, call, literal, unary
from pipegraph.codegen.syntax.statements import Statement
from pipegraph.graph.captured import model_dtype, model_number
from pipegraph.graph.nodes import dimension_of, dtypes_of, dynamic_sizes_of
from pipegraph.graph.symbolic_size import FUNCTIONS, SymbolicSize, UnknownSizeError, fold, in_dimensions

OF_MODEL_DTYPE = (model_dtype, model_number)
"""What such a node of a graph calls."""


class SizeVariables:
    """Where a ``forward`` reads the sizes that its operations name.

    Args:
        values: the variables of the ``forward``.
        sizes: the sizes that get a variable as soon as a value has them, because a later operation needs them when no
            variable has them any more.
    """

    def __init__(self, values: LocalVariables, sizes: Sequence[sympy.Expr]) -> None:
        self._values = values
        self._waiting = list(sizes)
        self._variables: dict[sympy.Expr, Name] = {}

    def expression(self, size: SymbolicSize) -> Expression:
        """The expression of a size.

        Raises:
            UnknownSizeError: no value has a size from which it follows.
        """
        try:
            return fold(size.expression, self._read, _combined, call)
        except UnknownSizeError as error:
            dimensions = [*dynamic_sizes_of(self._values.variables.values()), *self._variables]
            written = in_dimensions(size.expression, dimensions)
            if written is None:
                raise UnknownSizeError(error.size, size.expression) from error
            expression, places = written
            return fold(expression, lambda part: self._read(places.get(part, part)), _combined, call)

    def keep(self) -> None:
        """Write ``seq = x.shape[1]`` for the waiting sizes that a value has."""
        for size in list(self._waiting):
            expression = self._read(size)
            if expression is not None:
                self._variables[size] = self._values.keep(str(size) if size.is_Symbol else "size", expression)
                self._waiting.remove(size)

    def _read(self, size: sympy.Expr) -> Expression | None:
        """A number, or ``x.shape[1]`` for the first variable that has a size; None if no value has it."""
        values = self._values
        if size.is_Integer or size.is_Float:
            return literal(int(size) if size.is_Integer else float(size))
        if size in self._variables:
            return self._variables[size]
        variable = next((name for name, node in values.variables.items() if dimension_of(node, size) is not None), None)
        if variable is None:
            node = next((node for node in values.deferred if dimension_of(node, size) is not None), None)
            if node is None:
                return None
            values.write(node)
            return self._read(size)
        dim = dimension_of(values.variables[variable], size)
        return Subscript(Attribute(Name(variable), "shape"), (literal(dim),))


def _combined(symbol: str, left_operand: Expression, right: Expression) -> Expression:
    if symbol in FUNCTIONS.values():
        return call(symbol, left_operand, right)
    return unary("-", right) if symbol == "*" and left_operand == literal(-1) else Binary(symbol, left_operand, right)


class ReplacedInputError(Exception):
    """An operation names the size of a parameter that no variable has any more.

    Attributes:
        place: (position in ``inputs``, dimension).
        name: of the size in the source.
    """

    def __init__(self, place: tuple[int, int], name: str) -> None:
        super().__init__(name)
        self.place, self.name = place, name


class FixedSizes:
    """Where a ``forward`` reads the sizes of its parameters that never vary, as the source does: ``x[:, :x.shape[1]]``.

    Args:
        values: the variables of the ``forward``.
        contents: the class.
        parameters: the names of the parameters.
        source: says how the model's source calls a size.
        size_names: the sizes that get a variable at once: (position in ``inputs``, dimension) → its name.
    """

    def __init__(
        self,
        values: LocalVariables,
        contents: ClassContents,
        parameters: Sequence[str],
        source: SourceStatements | None,
        size_names: Mapping[tuple[int, int], str],
    ) -> None:
        self._values, self._contents, self._parameters = values, contents, parameters
        self._source, self._waiting = source, size_names
        self._variables: dict[tuple[int, int], Name] = {}

    def keep(self) -> None:
        """Write ``length = x.shape[1]`` for the sizes that get a variable."""
        for (position, dim), name in self._waiting.items():
            self._variables[position, dim] = self._values.keep(name, _size(self._parameters[position], dim))

    def named(self, expression: Expression, node: fx.Node, operands: Sequence[Expression]) -> Expression:
        """The expression of an operation, with sizes of parameters in place of numbers.

        Args:
            expression: of the operation.
            node: the operation.
            operands: the parts of the expression that other operations made.

        Raises:
            ReplacedInputError: neither the parameter is there any more, nor a variable of the size.
        """
        named = partial(with_fixed_sizes, expression, operands)
        return named(self._mentioned_sizes(node, lambda size: named({size: Name("size")}) != expression))

    def _mentioned_sizes(self, node: fx.Node, is_written: Callable[[int], bool]) -> dict[int, Expression]:
        """The sizes of parameters that the source of an operation mentions.

        Args:
            node: the operation.
            is_written: whether its expression has a number. Of ``x.view(rows, -1, width)`` it may have none.
        """
        sizes: dict[int, Expression] = {}
        for size, (position, dim) in self._contents.fixed_sizes.get(node, {}).items():
            name = self._parameters[position]
            if self._values.variables.get(name) is self._contents.inputs[position]:
                sizes[size] = _size(name, dim)
            elif (position, dim) in self._variables:
                sizes[size] = self._variables[position, dim]
            elif is_written(size):
                raise ReplacedInputError((position, dim), self._called(node, name, dim))
        return sizes

    def _called(self, node: fx.Node, parameter: str, dim: int) -> str:
        """``length`` where the source says ``rows, length = x.shape``."""
        assigned = self._source.sizes_assigned(node).items() if self._source is not None else ()
        return next((name for name, place in assigned if place == (parameter, dim)), f"{parameter}_{dim}")


def _size(tensor: str, dim: int) -> Expression:
    return Subscript(Attribute(Name(tensor), "shape"), (literal(dim),))


class UnknownAttributeError(Exception):
    """A module has no value with the dtype of the model, or no value to read the device from."""


_DEFAULT_DEVICE = call("torch.get_default_device")


class ModelAttributes:
    """Where a ``forward`` reads the device and the dtype of the model.

    Args:
        values: the variables of the ``forward``.
        contents: the class.
        tensors: the parameters of the ``forward`` and its state.

    Attributes:
        device: on which it makes tensors: ``x.device`` of its first parameter, or else of its state.
    """

    def __init__(self, values: LocalVariables, contents: ClassContents, tensors: Sequence[Expression]) -> None:
        self._values = values
        self._contents = contents
        self.device: Expression = Attribute(tensors[0], "device") if tensors else _DEFAULT_DEVICE

    def check(self, statements: Iterable[Statement]) -> None:
        """Raise UnknownAttributeError if a module makes a tensor and has no value with its device."""
        if self._contents.prefix and any(
            part == _DEFAULT_DEVICE for statement in statements for part in statement.walk()
        ):
            raise UnknownAttributeError

    def dtype(self, node: fx.Node) -> Expression:
        """``x.dtype`` or ``torch.finfo(x.dtype).min``, of the first variable or parameter that has the model's dtype.

        A stage without such a variable asks its modules: ``next(self.parameters()).dtype``.

        Raises:
            UnknownAttributeError: a module has no such value; the code around it has one. A stage without
                parameters of that dtype keeps the captured value.
        """
        values = self._values
        captured, converted, *limit = node.args
        places = (*values.variables.values(), *self._contents.state_names, *values.deferred)
        tensor = next((candidate for candidate in places if dtypes_of(candidate) == (captured, converted)), None)
        if tensor is not None:
            values.write(tensor)
            variable = next((Name(name) for name, candidate in values.variables.items() if candidate is tensor), None)
            holder: Expression = variable or values.written[tensor]
        elif self._contents.prefix:
            raise UnknownAttributeError
        elif {entry.dtype for entry in self._contents.state.values() if entry.kind == "parameter"} == {captured}:
            holder = call("next", call("self.parameters"))
        else:
            return literal(node.meta["val"])
        dtype = Attribute(holder, "dtype")
        return Attribute(call("torch.finfo", dtype), str(limit[0])) if limit else dtype
