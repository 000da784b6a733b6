"""One call of an operator, as the rules for rows read it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import sympy
from torch import Tensor, fx

from pipegraph.graph.batch.row_state import INVARIANT, Content, Counts, NoRuleError, Rows, RowsMixError, State
from pipegraph.graph.export.dynamic_shapes import BATCH
from pipegraph.graph.nodes import arguments_of, shape_of
from pipegraph.graph.symbolic_size import SymbolicSize
from pipegraph.torch_private.operators import OpOverload, operator_name, schema_arguments
from pipegraph.torch_private.pytrees import pytree

PROOF_ROWS = 2**4 * 3**2 * 5 * 7 * 1_000_003
"""The rows at which shapes are computed. No other size has this prime factor, so that a size which is a multiple of it
has rows; the small factors let expressions such as ``batch // 2`` be exact."""


def size_symbol(name: str) -> sympy.Symbol:
    """The symbol of a size."""
    return sympy.Symbol(name, integer=True, positive=True)


class RowSizes:
    """The sizes of a graph for a number of rows that no other size is a multiple of.

    Args:
        captured: size → its number at capture.
        batch: the sizes that are the number of rows.
        fixed_rows: the number of rows if it does not vary.

    Attributes:
        rows: the number of rows.
        vary: whether it varies.
    """

    def __init__(self, captured: Mapping[str, int], batch: Collection[str], fixed_rows: int | None = None) -> None:
        self._batch = frozenset(map(size_symbol, batch))
        self.rows = PROOF_ROWS if batch or not fixed_rows else fixed_rows
        self.vary = bool(batch)
        self._sizes = {size_symbol(name): PROOF_ROWS if name in batch else size for name, size in captured.items()}

    def renamed(self, captured: Mapping[str, int]) -> RowSizes:
        """The same for a graph in which the number of rows is called ``batch``."""
        return RowSizes(captured, {BATCH})

    def number(self, size: int) -> int:
        """A size as a number."""
        return size.at(self._sizes) if isinstance(size, SymbolicSize) else int(size)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of a value."""
        return tuple(map(self.number, shape_of(node)))

    def has_rows(self, size: int) -> bool:
        """Return whether a size is a multiple of the number of rows."""
        return self.vary and size > 0 and size % self.rows == 0

    def is_batch(self, size: object) -> bool:
        """Return whether a size depends on the number of rows."""
        return isinstance(size, SymbolicSize) and not self._batch.isdisjoint(size.symbols)


Place = Callable[[int], int]
"""A dimension of an argument → that of the result which it is."""


class RowCall:
    """A call of an operator.

    Args:
        node: the call.
        states: of the values before it.
        sizes: of the graph.

    Attributes:
        name: of the operator: ``softmax``.
        arguments: by the names of the schema, without defaults.
        shape: of the result, or of the first of several.
    """

    def __init__(self, node: fx.Node, states: Mapping[fx.Node, State], sizes: RowSizes) -> None:
        assert isinstance(node.target, OpOverload)
        self.node, self._states, self.sizes = node, states, sizes
        self.name, self.overload = operator_name(node.target)
        self.arguments = arguments_of(node)

    def __getitem__(self, name: str) -> Any:
        """An argument, or its default."""
        if name in self.arguments:
            return self.arguments[name]
        assert isinstance(self.node.target, OpOverload)
        schema = next((argument for argument in schema_arguments(self.node.target) if argument.name == name), None)
        return None if schema is None else schema.default_value

    @property
    def shape(self) -> tuple[int, ...]:
        return self.result_shape(0)

    def result_shape(self, index: int) -> tuple[int, ...]:
        """The shape of one of the results. Raises NoRuleError if nothing reads it."""
        if isinstance(self.node.meta.get("val"), Tensor):
            return self.sizes.shape(self.node)
        for user in self.node.users:
            if len(user.args) == 2 and user.args[1] == index:
                return self.sizes.shape(user)
        raise NoRuleError

    @property
    def results(self) -> int | None:
        """How many results there are; None for a single tensor."""
        value = self.node.meta.get("val")
        return len(value) if isinstance(value, (tuple, list)) else None

    @property
    def tensors(self) -> list[fx.Node]:
        """The arguments that are tensors, in order."""
        leaves = pytree.tree_leaves((self.node.args, self.node.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, fx.Node) and leaf in self._states]

    def with_rows(self, *, but: str = "") -> list[fx.Node]:
        """The arguments that have rows, without one."""
        excluded = self.arguments.get(but)
        return [node for node in self.tensors if isinstance(self.state(node), Rows) and node is not excluded]

    def state(self, node: Any) -> State:
        """The state of an argument. Numbers are whole."""
        return self._states[node] if isinstance(node, fx.Node) else INVARIANT

    def rows(self, node: Any) -> Rows | None:
        """The rows of an argument; None if it has none. Raises NoRuleError if its elements are indices."""
        state = self.state(node)
        if isinstance(state, Counts) or (isinstance(state, Rows) and state.is_index):
            raise NoRuleError
        return state if isinstance(state, Rows) else None

    def shape_of(self, node: Any) -> tuple[int, ...]:
        """The shape of an argument; that of a number is empty."""
        is_tensor = isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)
        return self.sizes.shape(node) if is_tensor else ()

    def numbers(self, sizes: Sequence[Any]) -> list[int]:
        """Sizes as numbers."""
        return [self.sizes.number(size) for size in sizes]

    def dim(self, name: str, node: Any, default: int | None = None) -> int:
        """An argument that names a dimension of a value, counted from the first. Raises NoRuleError if it has none."""
        number = self.arguments.get(name, default)
        if number is None:
            raise NoRuleError
        return int(number) % max(len(self.shape_of(node)), 1)

    def dims(self, name: str, node: Any) -> set[int]:
        """An argument that names dimensions of a value; all of them if it is left out or empty."""
        count = len(self.shape_of(node))
        value = self.arguments.get(name)
        if value is None or value == []:
            return set(range(count))
        return {int(dim) % max(count, 1) for dim in (value if isinstance(value, (list, tuple)) else [value])}

    def every(self, state: State) -> State | tuple[State, ...]:
        """A state for every result."""
        return state if self.results is None else (state,) * self.results

    def aligned(self, places: Iterable[tuple[Any, Place]], broadcasts: bool = True) -> Rows | None:
        """The rows that arguments have in common; None if none of them has rows.

        Args:
            places: each argument, and which dimension of the result one of its dimensions is; −1 for none.
            broadcasts: whether a dimension of size 1 fits any other one.

        Raises:
            RowsMixError: two arguments have their rows along different dimensions, so that each row is combined with
                all rows; or an argument without rows is not broadcast along the dimension of the rows.
        """
        common: Rows | None = None
        without_rows: list[tuple[Any, Place]] = []
        for node, place in places:
            rows = self.rows(node)
            if rows is None:
                without_rows.append((node, place))
                continue
            moved = Rows(place(rows.dim), rows.inner, rows.content)
            if moved.dim < 0:
                raise RowsMixError
            if common is None or (common.is_constant and common.dim == moved.dim):
                common = moved
            elif common.dim != moved.dim or (common.inner != moved.inner and not moved.is_constant):
                raise RowsMixError
            elif common.content != moved.content and not moved.is_constant:
                raise NoRuleError
        for node, place in without_rows if common is not None and self.sizes.vary else ():
            for dim, size in enumerate(self.shape_of(node)):
                if place(dim) == common.dim and not (broadcasts and size == 1):  # type: ignore[union-attr]
                    raise RowsMixError
        return common

    def broadcast(self, nodes: Sequence[Any], shape: Sequence[int]) -> State:
        """The rows of the result of a pointwise operator with arguments that are broadcast to a shape."""
        offsets = ((node, len(shape) - len(self.shape_of(node))) for node in nodes)
        return self.aligned((node, moved_by(offset)) for node, offset in offsets) or INVARIANT


def moved_by(offset: int) -> Place:
    """The place of dimensions in a result that has more dimensions in front."""
    return lambda dim: dim + offset


def uniform_rows(shape: Sequence[int], sizes: RowSizes) -> State:
    """The rows of a tensor of one number. Raises NoRuleError if several of its dimensions have rows."""
    dims = [dim for dim, size in enumerate(shape) if sizes.has_rows(size)]
    if not dims:
        return INVARIANT
    if len(dims) > 1:
        raise NoRuleError
    return Rows(dims[0], shape[dims[0]] // sizes.rows, Content.UNIFORM)
