"""Pair the operations of two graphs of one model, one of which was exported in another dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from pipegraph.graph.internals import pytree
from pipegraph.graph.nodes import SIZES, arguments_of, shape_of, source_line
from pipegraph.graph.operators import operator_of
from pipegraph.graph.symbolic_size import SymbolicSize

aten = torch.ops.aten

# What a node that is put into a graph has from the one in the other graph.
_PLACE = ("path", "regions", "in_every_mode", "stack_trace")


class TwinGraphs:
    """Two graphs of one model: what corresponds to what.

    A graph may lack what the other one has, if it would do nothing there: a slice of all there is, ``x[:, :length]``,
    is in a graph only if the length may vary; a model may cast only ``if x.dtype != weight.dtype``. Such a cast is put
    into the graph that lacks it. A branch on the dtype may also choose another kernel: an operation of another name on
    the same tensors.

    Attributes:
        pairs: the nodes that correspond, in order; empty if the graphs have other operations.
        full_slices: the nodes of the graph that take all of their argument. They have no pair.
        twins: all nodes of the other graph.
    """

    def __init__(self, graph: fx.Graph, twin: fx.Graph, own: torch.dtype, other: torch.dtype) -> None:
        self.dtypes = own, other
        self.pairs: list[tuple[fx.Node, fx.Node]] = []
        self._twin_of: dict[fx.Node, fx.Node] = {}
        self._node_of: dict[fx.Node, fx.Node] = {}
        if not self._pair(_without_checks(graph), _without_checks(twin)):
            self.pairs = []
        self.full_slices = [node for node in graph.nodes if _takes_all(node)]
        self.twins = list(twin.nodes)

    def node_of(self, twin: fx.Node) -> fx.Node:
        """The node that corresponds to one of the other graph."""
        return self._node_of[twin]

    def _pair(self, nodes: Iterator[fx.Node], twins: Iterator[fx.Node]) -> bool:
        """Pair all nodes, and return whether that succeeded."""
        node, twin = next(nodes, None), next(twins, None)
        while node is not None and twin is not None:
            if _correspond(node, twin):
                self._add(node, twin)
                node, twin = next(nodes, None), next(twins, None)
            elif (
                cast := _missing_cast(twin, before=node, value_of=self._node_of, dtypes=self.dtypes[::-1])
            ) is not None:
                self._add(cast, twin)
                twin = next(twins, None)
            elif (cast := _missing_cast(node, before=twin, value_of=self._twin_of, dtypes=self.dtypes)) is not None:
                self._add(node, cast)
                node = next(nodes, None)
            else:
                return False
        return node is twin is None

    def _add(self, node: fx.Node, twin: fx.Node) -> None:
        self.pairs.append((node, twin))
        self._twin_of[node], self._node_of[twin] = twin, node


def whole(node: fx.Node) -> fx.Node:
    """The value of which slices take all."""
    while _takes_all(node):
        node = node.all_input_nodes[0]
    return node


def same_argument(node: fx.Node, argument: Any, twin: Any) -> bool:
    """Return whether an argument of an operation is the same in both graphs.

    A size may be an expression in one and a number in the other, a float may depend on the dtype, and a slice begins at
    0 or at None.
    """
    if isinstance(argument, SymbolicSize) or isinstance(twin, SymbolicSize):
        return isinstance(argument, int) and isinstance(twin, int) and int(argument) == int(twin)
    if isinstance(argument, float) and isinstance(twin, float):
        return True
    return bool(argument == twin) or (node.target is aten.slice.Tensor and {argument, twin} == {0, None})


def _without_checks(graph: fx.Graph) -> Iterator[fx.Node]:
    return iter([node for node in graph.nodes if not _takes_all(node) and not operator_of(node).check])


def _takes_all(node: fx.Node) -> bool:
    """Return whether an operation is a slice that takes all there is at the sizes of the example, or an alias."""
    if node.target is aten.alias.default:
        return True
    if node.target is not aten.slice.Tensor or arguments_of(node).get("step", 1) != 1:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and bool(source.meta["val"].shape == node.meta["val"].shape)


def _correspond(node: fx.Node, twin: fx.Node) -> bool:
    """Return whether two nodes are the same step of the model. Casts are if they are on the same line of its source."""
    if node.op != twin.op or node.op != "call_function":
        return node.op == twin.op
    if node.target is twin.target:
        return not operator_of(node).cast or source_line(node) == source_line(twin)
    shapes = [
        pytree.tree_map(
            lambda value: getattr(value, "shape", None), [each.meta.get("val"), *map(_value, each.all_input_nodes)]
        )
        for each in (node, twin)
    ]
    return not any(operator_of(each).cast for each in (node, twin)) and bool(shapes[0] == shapes[1])


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _missing_cast(
    cast: fx.Node, before: fx.Node, value_of: dict[fx.Node, fx.Node], dtypes: tuple[torch.dtype, torch.dtype]
) -> fx.Node | None:
    """Put a cast into a graph that lacks it because it does nothing there, and return it.

    Args:
        cast: the cast, in the other graph.
        before: where to put it.
        value_of: node of the other graph → node of this one.
        dtypes: the dtypes of the model in the graph that has the cast, and in this one.

    Returns:
        the new node; None if ``cast`` is no cast, or would do something.
    """
    if cast.target is not aten.to.dtype or whole(cast.all_input_nodes[0]) not in value_of:
        return None
    source = value_of[whole(cast.all_input_nodes[0])]
    asked = cast.args[1]
    dtype = dtypes[1] if asked == dtypes[0] else asked
    if source.meta["val"].dtype != dtype:
        return None
    with before.graph.inserting_before(before):
        made = before.graph.call_function(aten.to.dtype, (source, dtype, *cast.args[2:]), dict(cast.kwargs))
    made.meta = {key: cast.meta[key] for key in _PLACE if key in cast.meta}
    made.meta |= {"val": source.meta["val"], SIZES: shape_of(source)}
    return made
