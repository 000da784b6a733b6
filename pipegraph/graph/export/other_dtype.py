"""Compare a model's graph with the one that it has in another dtype, which shows what its casts follow."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from pipegraph.graph.export.flatten import flatten
from pipegraph.graph.export.torch_export import Exported, export_in
from pipegraph.graph.export.twin_graph import TwinGraphs, same_argument, whole
from pipegraph.graph.internals import OpOverload, pytree
from pipegraph.graph.model_structure import state_of
from pipegraph.graph.nodes import OTHER_DTYPE, RELATIVE_DTYPE, RELATIVE_NUMBERS, arguments_of
from pipegraph.graph.operators import operator_of


def mark_dtypes(
    graph: fx.Graph, exported: Exported, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Export the model again in the same way, as ``model.to(dtype)`` would leave it, and mark what differs.

    In one graph ``x.float()`` and ``x.to(y.dtype)`` are casts to a fixed dtype, or do nothing. In the two graphs
    together the first is always the same dtype, and the second is another one.

    ``meta["other_dtype"]`` of each node is the dtype of its value in the other graph, and ``meta["relative_dtype"]``
    says that an operation was given a dtype that follows the model's. There are no marks if the graphs have other
    operations, or if the model has parameters of several dtypes or of none.

    A cast that does nothing returns its argument, and export takes all later uses of the argument for uses of the cast.
    What was really used is found in the other graph, and put right.

    The other graph has numbers for sizes at first, which takes a third of the time. If the graphs do not correspond
    then, it is made in the same way as the first.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if len(dtypes) != 1:
        return
    (own,) = dtypes
    other = torch.bfloat16 if own == torch.float32 else torch.float32
    for fixed in dict.fromkeys((None, exported.fixed)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the model's own were shown when it was exported
                program = export_in(exported.mode, model, args, kwargs, other, fixed=fixed)
                twin, _ = flatten(program, *state_of(model))
        except Exception:  # whatever the model raises in a dtype that it was not written for
            return
        comparison = _DtypeComparison(TwinGraphs(graph, twin, own, other))
        if comparison.succeeds():
            comparison.apply()
            return


class _DtypeComparison:
    """What the operations of two graphs of one model read, in both."""

    def __init__(self, graphs: TwinGraphs) -> None:
        self._graphs = graphs
        # What a node is equal to in its own graph, casts that do nothing left out.
        self._equals: dict[fx.Node, fx.Node] = {}
        self._alike: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self._arguments: dict[fx.Node, tuple[Any, Any]] = {}
        self._relative: set[fx.Node] = set()

    def succeeds(self) -> bool:
        """Return whether the two run the same operations on the same values."""
        pairs = self._graphs.pairs
        return bool(pairs) and all(self._compare(node, twin) for node, twin in pairs)

    def apply(self) -> None:
        """Write the marks, and the arguments and places in calls that both graphs agree on."""
        places = {key: list(self._places(key)) for key in ("argument_of", "result_of")}
        for node, twin in self._graphs.pairs:
            if node in self._arguments:
                node.args, node.kwargs = self._arguments[node]
            value = twin.meta.get("val")
            if isinstance(value, torch.Tensor):
                node.meta[OTHER_DTYPE] = value.dtype
            if node in self._relative:
                node.meta[RELATIVE_DTYPE] = True
            numbers = _numbers(node, twin, *self._graphs.dtypes)
            if numbers:
                node.meta[RELATIVE_NUMBERS] = numbers
        for node in self._graphs.full_slices:
            if OTHER_DTYPE in whole(node).meta:
                node.meta[OTHER_DTYPE] = whole(node).meta[OTHER_DTYPE]
        for key, found in places.items():
            for node in self._nodes():
                node.meta.pop(key, None)
            for node, call, place in found:
                node.meta.setdefault(key, {})[call] = place

    def _compare(self, node: fx.Node, twin: fx.Node) -> bool:
        leaves, form = pytree.tree_flatten((node.args, node.kwargs))
        twin_leaves, twin_form = pytree.tree_flatten((twin.args, twin.kwargs))
        if node.target is not twin.target and node.op == "call_function":
            # Another kernel: it takes the same tensors.
            twin_nodes = [leaf for leaf in twin_leaves if isinstance(leaf, fx.Node)]
            if len(twin_nodes) != sum(isinstance(leaf, fx.Node) for leaf in leaves):
                return False
            waiting = iter(twin_nodes)
            twin_leaves = [next(waiting) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        elif form != twin_form:
            return False
        found = []
        for leaf, twin_leaf in zip(leaves, twin_leaves, strict=True):
            if isinstance(leaf, fx.Node):
                if not isinstance(twin_leaf, fx.Node) or (agreed := self._agreed(leaf, twin_leaf)) is None:
                    return False
                leaf = agreed
            elif (leaf, twin_leaf) == self._graphs.dtypes:
                self._relative.add(node)
            elif not same_argument(node, leaf, twin_leaf):
                return False
            found.append(leaf)
        self._arguments[node] = pytree.tree_unflatten(found, form)
        for each in (node, twin):
            source = each.args[0] if each.args and _does_nothing(each) else None
            self._equals[each] = self._equals[whole(source)] if isinstance(source, fx.Node) else each
        self._alike.setdefault((self._equals[node], self._equals[twin]), node)
        return True

    def _agreed(self, node: fx.Node, twin: fx.Node) -> fx.Node | None:
        """Return the value that is ``node`` in one graph and ``twin`` in the other; None if there is none."""
        source, twin = whole(node), whole(twin)
        if self._graphs.node_of(twin) is source:
            return node
        agreed = self._alike.get((self._equals[source], self._equals[twin]))
        return agreed if agreed is source or node is source else None

    def _places(self, key: str) -> Iterator[tuple[fx.Node, str, Any]]:
        """Yield each place of a value in a call, at the value that both graphs agree on."""
        twins = {
            (call, place.order): twin for twin in self._graphs.twins for call, place in twin.meta.get(key, {}).items()
        }
        for node in self._nodes():
            for call, place in node.meta.get(key, {}).items():
                twin = twins.get((call, place.order))
                agreed = None if twin is None else self._agreed(node, twin)
                yield agreed or node, call, place

    def _nodes(self) -> list[fx.Node]:
        return [*(node for node, _ in self._graphs.pairs), *self._graphs.full_slices]


def _numbers(
    node: fx.Node, twin: fx.Node, own: torch.dtype, other: torch.dtype
) -> dict[str, tuple[torch.dtype, torch.dtype, str]]:
    """The arguments of an operation that are what ``torch.finfo`` says of the model's dtype."""
    if not isinstance(node.target, OpOverload) or node.target is not twin.target:
        return {}
    arguments, twins = arguments_of(node), arguments_of(twin)
    found = {}
    for name, value in arguments.items():
        if isinstance(value, float) and value != twins.get(name):
            for limit in ("min", "max", "eps", "tiny"):
                if (value, twins.get(name)) == (getattr(torch.finfo(own), limit), getattr(torch.finfo(other), limit)):
                    found[name] = own, other, limit
    return found


def _does_nothing(node: fx.Node) -> bool:
    """Return whether an operation is a cast that returned its argument."""
    if not operator_of(node).cast or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    return (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and before.dtype == after.dtype
        and before.device == after.device
        and not any(value for name, value in arguments_of(node).items() if name in ("copy", "memory_format"))
    )
