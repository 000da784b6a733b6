"""The sizes of a traced function: symbols, their numbers and places in a call, and the conditions that tracing sets.

In a graph they are nodes that read sizes alone. Every graph computes those that it needs again, so that no size is
saved for the backward, and no tensor is kept because its size is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, fx

from pipegraph.torch_private.symbolic_shapes import (
    condition_count,
    evaluate,
    expression,
    is_symbolic,
    new_symbol,
    shape_environment,
)
from pipegraph.torch_private.symbolic_shapes import conditions as torch_conditions
from pipegraph.torch_private.symbolic_shapes import described as torch_described
from pipegraph.torch_private.symbolic_shapes import hold as torch_hold

Numbers = tuple[int, ...]
"""The sizes of a call, in the order of the function's symbols."""

Shapes = tuple[tuple[int, ...], ...]

Dimension = int | str | None
"""A number that never changes, the name of a size, or None if nothing is known."""


class SymbolicSizes:
    """The sizes of a function that may differ between its calls. A function traced for one shape has none.

    What is traced or compiled with the symbols may hold under a condition alone, such as `size_0 % 4 == 0`. Torch notes
    it with the symbols, and no symbol is 0.

    Args:
        numbers: the sizes of the call that is traced.
        names: what they are called; by default size_0 and so on.

    Attributes:
        environment: where torch notes the conditions; None without symbols.
        values: the symbols as sizes of fake tensors.
        symbols: the same in expressions.
    """

    def __init__(self, numbers: Sequence[int] = (), names: Sequence[str] | None = None) -> None:
        self.environment = shape_environment() if numbers else None
        self.values = tuple(
            new_symbol(self.environment, f"size_{index}", number) for index, number in enumerate(numbers)
        )
        self.symbols: tuple[Any, ...] = tuple(map(expression, self.values))
        self._names = names or [f"size_{index}" for index in range(len(numbers))]
        self._expressions: list[Any] = []
        self._validity: dict[Numbers, bool] = {}
        self._condition_count = -1

    def __len__(self) -> int:
        return len(self.symbols)

    def conditions(self) -> list[Any]:
        """Return what the graphs traced and compiled until now take for granted, as expressions of the symbols."""
        if self.environment is None:
            return []
        count = condition_count(self.environment)
        if count != self._condition_count:
            self._expressions, self._condition_count = torch_conditions(self.environment), count
            self._validity.clear()
        return self._expressions

    def described(self) -> list[str]:
        """Return the conditions as text."""
        if self.environment is None:
            return []
        return torch_described(self.environment, dict(zip(self.symbols, self._names, strict=True)))

    def hold(self, numbers: Numbers) -> bool:
        """Return whether the conditions hold for these sizes."""
        conditions = self.conditions()
        if numbers not in self._validity:
            self._validity[numbers] = torch_hold(conditions, dict(zip(self.symbols, numbers, strict=True)))
        return self._validity[numbers]

    def at(self, values: Iterable[Any], numbers: Sequence[Any]) -> list[Any]:
        """Return sizes or strides that depend on the symbols, with `numbers` in the symbols' place."""
        if not self.symbols:
            return list(values)
        substitutions = dict(zip(self.symbols, numbers, strict=True))
        return [evaluate(expression(value), substitutions) for value in values]


class SizeMap:
    """Sizes that follow from those of a function: of a block that it calls, say. Each call is evaluated once."""

    def __init__(self, sizes: SymbolicSizes, values: Sequence[Any]) -> None:
        self._sizes = sizes
        self._expressions = tuple(map(expression, values))
        self._evaluated: dict[Numbers, Numbers] = {}

    def __call__(self, numbers: Numbers) -> Numbers:
        if numbers not in self._evaluated:
            self._evaluated[numbers] = tuple(self._sizes.at(self._expressions, numbers))
        return self._evaluated[numbers]


def dimensions(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return sizes or strides in a form that can be hashed and compared, without a condition on symbols."""
    return tuple(map(expression, values))


def contiguous_strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strides of a tensor whose last dimension is the innermost: numbers, symbols or expressions."""
    strides: list[Any] = []
    stride: Any = 1
    for size in reversed(shape):
        strides.append(stride)
        stride = stride * (1 if isinstance(size, int) and size == 0 else size)
    return tuple(reversed(strides))


def are_equal(values: Iterable[Any], other_values: Iterable[Any]) -> bool:
    """Return whether two shapes, or two strides, are equal for all sizes, as far as expressions show."""
    return dimensions(values) == dimensions(other_values)


def is_size(node: fx.Node) -> bool:
    """Return whether a node is a size, or computed from sizes."""
    return is_symbolic(node.meta.get("val"))


def compute_from_sizes(graph: fx.Graph, sizes: SymbolicSizes) -> None:
    """Let every size in a graph be computed from the graph's first placeholders, the sizes, instead of from tensors."""
    placeholders = graph.find_nodes(op="placeholder")[: len(sizes)]
    of_tensors = [node for node in graph.nodes if is_size(node) and not all(map(is_size, node.all_input_nodes))]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in of_tensors:
        with graph.inserting_before(first):
            (value,) = size_nodes(graph, [node.meta["val"]], sizes, placeholders)
        if isinstance(value, fx.Node):
            node.replace_all_uses_with(value)
        for user in list(node.users):  # of a size that turned out to be a number
            user.args = fx.node.map_arg(user.args, partial(_instead, {node: value}))
            user.kwargs = fx.node.map_arg(user.kwargs, partial(_instead, {node: value}))
        graph.erase_node(node)


def size_nodes(
    graph: fx.Graph, values: Sequence[Any], sizes: SymbolicSizes, placeholders: Sequence[fx.Node]
) -> list[Any]:
    """Return sizes as arguments of a node: numbers, or nodes that are computed from the placeholders.

    Args:
        graph: gets the nodes, at its insertion point.
        values: numbers and symbolic values.
        sizes: their symbols.
        placeholders: of the graph, one for each symbol.
    """
    existing_nodes = set(graph.nodes)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in zip(sizes.symbols, placeholders, strict=True)}
    arguments = [evaluate(expression(value), proxies) for value in values]
    for node in graph.nodes:
        if node not in existing_nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda input_node: input_node.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)
    return [argument.node if isinstance(argument, fx.Proxy) else argument for argument in arguments]


def _instead(values: Mapping[fx.Node, Any], node: fx.Node) -> Any:
    return values.get(node, node)


class CallSize(NamedTuple):
    """A dimension that is a size of the calls, by its position among them."""

    number: int


@dataclass(frozen=True)
class CallLayout:
    """The shapes of a call's tensors, for all sizes.

    Attributes:
        shapes: of each tensor, its dimensions: numbers and sizes.
        orders: of each tensor, its dimensions from the outermost to the innermost in memory.
        numbers: the sizes of the call that this was made for.
        names: what the sizes are called.
    """

    shapes: tuple[tuple[int | CallSize, ...], ...]
    orders: tuple[tuple[int, ...], ...]
    numbers: Numbers
    names: tuple[str, ...]

    def match(self, tensors: Sequence[Tensor]) -> Numbers | None:
        """Return the sizes of these tensors, or None if they have other fixed dimensions, or two numbers for a size."""
        numbers = list(self.numbers)
        is_bound = [False] * len(numbers)
        for shape, tensor in zip(self.shapes, tensors, strict=True):
            for dimension, number in zip(shape, tensor.shape, strict=True):
                if not isinstance(dimension, CallSize):
                    if dimension != number:
                        return None
                elif not is_bound[dimension.number]:
                    is_bound[dimension.number], numbers[dimension.number] = True, number
                elif numbers[dimension.number] != number:
                    return None
        return tuple(numbers)

    def shapes_at(self, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the shapes for sizes: numbers or symbols."""
        return [
            tuple(values[dimension.number] if isinstance(dimension, CallSize) else dimension for dimension in shape)
            for shape in self.shapes
        ]

    def strides_at(self, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the strides for sizes. A tensor with gaps in memory, or with overlaps, is one without them here."""
        return [
            tuple(
                stride for _, stride in sorted(zip(order, contiguous_strides([shape[i] for i in order]), strict=True))
            )
            for shape, order in zip(self.shapes_at(values), self.orders, strict=True)
        ]


def call_layout(
    tensors: Sequence[Tensor], calls: Sequence[Shapes], names: Sequence[Sequence[Dimension]], ones_as_sizes: bool = True
) -> CallLayout:
    """Return the layout of a call, and of all calls that differ in sizes alone.

    A dimension is a size if it has a name, or was another number in an earlier call. Dimensions with one name are one
    size, and so are those without a name that were equal in all calls. A dimension of unknown meaning that always had
    the number of a named size is that size: a target has the batch's rows, and a row's tokens. A dimension that was
    never more than 1 is not a size: it may be one that broadcasts.

    Args:
        tensors: of this call.
        calls: the shapes of the calls until now, this one included.
        names: of each tensor, what is known of its dimensions.
        ones_as_sizes: whether a dimension that is 1 now, and was more, is a size. It is traced with its largest number.
    """
    sizes: dict[Any, CallSize] = {}
    by_history: dict[tuple[int, ...], CallSize] = {}
    extent: dict[tuple[int, int], int | CallSize] = {}
    numbers: dict[CallSize, tuple[int, str]] = {}
    places = [
        (position, dim, tuple(shapes[position][dim] for shapes in calls), names[position][dim])
        for position, tensor in enumerate(tensors)
        for dim in range(tensor.dim())
    ]
    places.sort(key=lambda place: not isinstance(place[-1], str))  # those with a name first
    for position, dim, history, name in places:
        is_named, varies = isinstance(name, str), len(set(history)) > 1
        number = history[-1] if history[-1] > 1 or not ones_as_sizes else max(history)
        if number > 1 and (is_named or varies or (name is None and history in by_history)):
            new = CallSize(len(numbers))
            size = sizes.setdefault((name, history), new) if is_named else by_history.get(history, new)
            by_history.setdefault(history, size)
            numbers.setdefault(size, (number, name if isinstance(name, str) else f"size_{size.number}"))
            extent[position, dim] = size
        else:
            extent[position, dim] = history[-1]
    return CallLayout(
        shapes=tuple(tuple(extent[index, dim] for dim in range(tensor.dim())) for index, tensor in enumerate(tensors)),
        orders=tuple(map(_order, tensors)),
        numbers=tuple(number for number, _ in numbers.values()),
        names=tuple(name for _, name in numbers.values()),
    )


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor from the outermost to the innermost; of another one, as they stand."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    dense = zip(order, contiguous_strides([tensor.shape[dim] for dim in order]), strict=True)
    is_dense = all(strides[dim] == stride or tensor.shape[dim] == 1 for dim, stride in dense)
    return tuple(order if is_dense else range(tensor.dim()))
