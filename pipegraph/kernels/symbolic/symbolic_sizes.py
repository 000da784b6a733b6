"""The sizes of a traced function: symbols, their numbers in a call, and the conditions that tracing sets on them.

In a graph they are nodes that read sizes alone. Every graph computes those that it needs again, so that no size is
saved for the backward, and no tensor is kept because its size is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx

from pipegraph.kernels.symbolic import internals
from pipegraph.kernels.symbolic.internals import evaluate, expression, is_symbolic

Numbers = tuple[int, ...]
"""The sizes of a call, in the order of the function's symbols."""


class SymbolicSizes:
    """The sizes of a function that may differ between its calls. A function traced for one shape has none.

    What is traced or compiled with the symbols may hold under a condition alone, such as `size_0 % 4 == 0`. Torch notes
    it with the symbols, and no symbol is 0.

    Args:
        numbers: the sizes of the call that is traced.
        names: what they are called; by default size_0 and so on.

    Attributes:
        environment: where torch notes the conditions; None without symbols.
        values: the symbols as sizes of tensors without memory.
        symbols: the same in expressions.
    """

    def __init__(self, numbers: Sequence[int] = (), names: Sequence[str] | None = None) -> None:
        self.environment = internals.shape_environment() if numbers else None
        self.values = tuple(
            internals.new_symbol(self.environment, f"size_{index}", number) for index, number in enumerate(numbers)
        )
        self.symbols: tuple[Any, ...] = tuple(map(expression, self.values))
        self._names = names or [f"size_{index}" for index in range(len(numbers))]
        self._expressions: list[Any] = []
        self._held: dict[Numbers, bool] = {}
        self._seen = -1

    def __len__(self) -> int:
        return len(self.symbols)

    def conditions(self) -> list[Any]:
        """Return what the graphs traced and compiled until now take for granted, as expressions of the symbols."""
        if self.environment is None:
            return []
        count = internals.condition_count(self.environment)
        if count != self._seen:
            self._expressions, self._seen = internals.conditions(self.environment), count
            self._held.clear()
        return self._expressions

    def described(self) -> list[str]:
        """Return the conditions as text."""
        if self.environment is None:
            return []
        return internals.described(self.environment, dict(zip(self.symbols, self._names, strict=True)))

    def hold(self, numbers: Numbers) -> bool:
        """Return whether the conditions hold for these sizes."""
        conditions = self.conditions()
        if numbers not in self._held:
            self._held[numbers] = internals.hold(conditions, dict(zip(self.symbols, numbers, strict=True)))
        return self._held[numbers]

    def at(self, values: Iterable[Any], numbers: Sequence[Any]) -> list[Any]:
        """Return sizes or strides that depend on the symbols, with `numbers` in the symbols' place."""
        if not self.symbols:
            return list(values)
        given = dict(zip(self.symbols, numbers, strict=True))
        return [evaluate(expression(value), given) for value in values]


class SizeMap:
    """Sizes that follow from those of a function: of a block that it calls, say. Each call is evaluated once."""

    def __init__(self, sizes: SymbolicSizes, values: Sequence[Any]) -> None:
        self._sizes = sizes
        self._expressions = tuple(map(expression, values))
        self._found: dict[Numbers, Numbers] = {}

    def __call__(self, numbers: Numbers) -> Numbers:
        if numbers not in self._found:
            self._found[numbers] = tuple(self._sizes.at(self._expressions, numbers))
        return self._found[numbers]


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


def same(values: Iterable[Any], others: Iterable[Any]) -> bool:
    """Return whether two shapes, or two strides, are equal for all sizes, as far as expressions show."""
    return dimensions(values) == dimensions(others)


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
        graph: to which the nodes are added, where it is inserting.
        values: numbers and symbolic values.
        sizes: their symbols.
        placeholders: of the graph, one for each symbol.
    """
    before = set(graph.nodes)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in zip(sizes.symbols, placeholders, strict=True)}
    found = [evaluate(expression(value), proxies) for value in values]
    for node in graph.nodes:
        if node not in before:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)
    return [each.node if isinstance(each, fx.Proxy) else each for each in found]


def _instead(values: Mapping[fx.Node, Any], node: fx.Node) -> Any:
    return values.get(node, node)
