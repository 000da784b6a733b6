"""Compare a model's graph with the one that it has in another dtype, which shows what its casts follow."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn

from pipegraph.graph.calls import VariablePlace
from pipegraph.graph.export.dtype_reads import begins_recurrence
from pipegraph.graph.export.dynamic_shapes import USUAL_NAMES, SizeNames
from pipegraph.graph.export.flatten import flatten
from pipegraph.graph.export.torch_export import Exported, export_in
from pipegraph.graph.model_structure import state_of
from pipegraph.graph.nodes import (
    OTHER_DTYPE,
    RELATIVE_DTYPE,
    RELATIVE_NUMBERS,
    SIZES,
    arguments_of,
    shape_of,
    source_line,
)
from pipegraph.graph.operators import operator_of
from pipegraph.graph.symbolic_size import SymbolicSize
from pipegraph.torch_private.fake_tensors import new_fake_mode
from pipegraph.torch_private.operators import OpOverload
from pipegraph.torch_private.pytrees import pytree

aten = torch.ops.aten

# What a node that is put into a graph has from the one in the other graph.
_PLACE = ("path", "functions", "regions", "in_every_mode", "stack_trace")


def mark_dtypes(
    graph: fx.Graph,
    exported: Exported,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: SizeNames = USUAL_NAMES,
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
    then, it is made in the same way as the first. A model that neither reads a dtype nor casts has no other graph: its
    operations are run on values of the other dtype instead.
    """
    if (dtype := dtype_of(model)) is None:
        return
    other_dtype = torch.bfloat16 if dtype == torch.float32 else torch.float32
    if not exported.reads_dtype and not any(map(_may_change_dtype, graph.nodes)):
        _mark_computed(graph, dtype, other_dtype)
        return
    for fixed in dict.fromkeys((None, exported.fixed)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the model's own were shown when it was exported
                program = export_in(
                    exported.mode, model, args, kwargs, other_dtype, fixed=fixed, keeps_int=exported.keeps_int
                )
                twin, _ = flatten(program, *state_of(model), names)
        except Exception:  # whatever the model raises in a dtype that it was not written for
            return
        comparison = _DtypeComparison(DtypeProbe(graph, twin, dtype, other_dtype))
        if comparison.succeeds():
            comparison.apply()
            return


def _may_change_dtype(node: fx.Node) -> bool:
    """Return whether an operation is a cast, or stands in a region of autocast."""
    return operator_of(node).cast or any(kind == "autocast" for kind, _ in node.meta.get("regions", ()))


def _mark_computed(graph: fx.Graph, dtype: torch.dtype, other_dtype: torch.dtype) -> None:
    """Mark the dtypes that the operations of a graph return in a model of another dtype. No marks if one fails."""
    mode = new_fake_mode()
    values: dict[fx.Node, Any] = {}
    relative: list[fx.Node] = []

    def converted(node: fx.Node) -> Any:
        value = node.meta["val"]
        is_converted = node.meta.get("kind") != "constant" and value.is_floating_point()
        new_dtype = other_dtype if is_converted else value.dtype
        return torch.empty_strided(value.shape, value.stride(), dtype=new_dtype, device=value.device)

    try:
        with mode, torch.no_grad():
            for node in graph.nodes:
                if node.op == "call_function":
                    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                    if begins_recurrence(node) and kwargs.get("dtype") == dtype:
                        relative.append(node)
                        kwargs = {**kwargs, "dtype": other_dtype}
                    values[node] = node.target(*args, **kwargs)
                elif node.op != "output":
                    values[node] = converted(node)
    except Exception:  # whatever an operation raises in a dtype that it does not take
        return
    for node, value in values.items():
        if isinstance(value, torch.Tensor):
            node.meta[OTHER_DTYPE] = value.dtype
    for node in relative:
        node.meta[RELATIVE_DTYPE] = True


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """Return the floating dtype of the parameters of a model; None if they have several or none."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def other_dtypes(model: nn.Module) -> list[torch.dtype]:
    """Return the usual floating dtypes that a model may be converted to."""
    return [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if dtype != dtype_of(model)]


class _DtypeComparison:
    """What the operations of two graphs of one model read, in both."""

    def __init__(self, graphs: DtypeProbe) -> None:
        self._graphs = graphs
        # What a node is equal to in its own graph, casts that do nothing left out.
        self._equals: dict[fx.Node, fx.Node] = {}
        self._node_by_pair: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self._arguments: dict[fx.Node, tuple[Any, Any]] = {}
        self._relative: set[fx.Node] = set()

    def succeeds(self) -> bool:
        """Return whether the two run the same operations on the same values."""
        pairs = self._graphs.pairs
        return bool(pairs) and all(self._compare(node, twin) for node, twin in pairs)

    def apply(self) -> None:
        """Write the marks, and the arguments and places in calls that both graphs agree on."""
        places = {key: list(self._places(key)) for key in ("argument_of", "result_of")}
        variables = list(self._variables())
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
            if OTHER_DTYPE in unsliced_node(node).meta:
                node.meta[OTHER_DTYPE] = unsliced_node(node).meta[OTHER_DTYPE]
        for key, call_places in places.items():
            for node in self._nodes():
                node.meta.pop(key, None)
            for node, call, place in call_places:
                node.meta.setdefault(key, {})[call] = place
        for node in self._nodes():
            node.meta.pop("variables", None)
        for node, call, place in variables:
            calls = node.meta.setdefault("variables", {})
            calls[call] = (*calls.get(call, ()), place)

    def _compare(self, node: fx.Node, twin: fx.Node) -> bool:
        leaves, form = pytree.tree_flatten((node.args, node.kwargs))
        twin_leaves, twin_form = pytree.tree_flatten((_twin_arguments(node, twin), twin.kwargs))
        if node.target is not twin.target and node.op == "call_function":
            # Another kernel: it takes the same tensors.
            twin_nodes = [leaf for leaf in twin_leaves if isinstance(leaf, fx.Node)]
            if len(twin_nodes) != sum(isinstance(leaf, fx.Node) for leaf in leaves):
                return False
            waiting = iter(twin_nodes)
            twin_leaves = [next(waiting) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        elif form != twin_form:
            return False
        common_leaves = []
        for leaf, twin_leaf in zip(leaves, twin_leaves, strict=True):
            if isinstance(leaf, fx.Node):
                if not isinstance(twin_leaf, fx.Node) or (common_node := self._common_node(leaf, twin_leaf)) is None:
                    return False
                leaf = common_node
            elif (leaf, twin_leaf) == self._graphs.dtypes:
                self._relative.add(node)
            elif not same_argument(node, leaf, twin_leaf):
                return False
            common_leaves.append(leaf)
        self._arguments[node] = pytree.tree_unflatten(common_leaves, form)
        for operation in (node, twin):
            source = operation.args[0] if operation.args and _does_nothing(operation) else None
            self._equals[operation] = self._equals[unsliced_node(source)] if isinstance(source, fx.Node) else operation
        self._node_by_pair.setdefault((self._equals[node], self._equals[twin]), node)
        return True

    def _common_node(self, node: fx.Node, twin: fx.Node) -> fx.Node | None:
        """Return the value that is ``node`` in one graph and ``twin`` in the other; None if they differ."""
        source, twin = unsliced_node(node), unsliced_node(twin)
        if self._graphs.node_of(twin) is source:
            return node
        common_node = self._node_by_pair.get((self._equals[source], self._equals[twin]))
        return common_node if common_node is source or node is source else None

    def _places(self, key: str) -> Iterator[tuple[fx.Node, str, Any]]:
        """Yield each place of a value in a call, at the value that both graphs agree on."""
        twins = {
            (call, place.order): twin for twin in self._graphs.twins for call, place in twin.meta.get(key, {}).items()
        }
        for node in self._nodes():
            for call, place in node.meta.get(key, {}).items():
                twin = twins.get((call, place.order))
                common_node = None if twin is None else self._common_node(node, twin)
                yield common_node or node, call, place

    def _variables(self) -> Iterator[tuple[fx.Node, str, VariablePlace]]:
        """Yield each variable of a call, at the value that both graphs agree on.

        In the graph in which a cast does nothing, a variable that is assigned the cast of itself does not change. So
        the variables of a call are those of the graph that has more of them.
        """
        by_call, twins_by_call = _variables_by_call(self._nodes()), _variables_by_call(self._graphs.twins)
        for call in dict.fromkeys((*by_call, *twins_by_call)):
            nodes, twins = by_call.get(call, {}), twins_by_call.get(call, {})
            turns, twin_turns = _turns(nodes), _turns(twins)
            node_of = {turn: nodes[place] for place, turn in turns.items()}
            twin_of = {turn: twins[place] for place, turn in twin_turns.items()}
            for place, turn in (turns if len(nodes) >= len(twins) else twin_turns).items():
                node, twin = node_of.get(turn), twin_of.get(turn)
                if node is None:
                    assert twin is not None
                    yield self._graphs.node_of(unsliced_node(twin)), call, place
                else:
                    yield (twin and self._common_node(node, twin)) or node, call, place

    def _nodes(self) -> list[fx.Node]:
        return [*(node for node, _ in self._graphs.pairs), *self._graphs.full_slices]


def _variables_by_call(nodes: Iterable[fx.Node]) -> dict[str, dict[VariablePlace, fx.Node]]:
    by_call: dict[str, dict[VariablePlace, fx.Node]] = {}
    for node in nodes:
        for call, places in node.meta.get("variables", {}).items():
            by_call.setdefault(call, {}).update(dict.fromkeys(places, node))
    return by_call


def _turns(places: Iterable[VariablePlace]) -> dict[VariablePlace, VariablePlace]:
    """The assignments of a call → the same with, as order, which iteration of a loop it is on its line."""
    counts: Counter[VariablePlace] = Counter()
    turns = {}
    for place in sorted(places, key=lambda place: place.order):
        line = place._replace(order=0)
        turns[place] = place._replace(order=counts[line])
        counts[line] += 1
    return turns


def _numbers(
    node: fx.Node, twin: fx.Node, dtype: torch.dtype, other_dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, torch.dtype, str]]:
    """The arguments of an operation that are what ``torch.finfo`` says of the model's dtype."""
    if not isinstance(node.target, OpOverload) or node.target is not twin.target:
        return {}
    arguments, twins = arguments_of(node), arguments_of(twin)
    numbers = {}
    for name, value in arguments.items():
        if isinstance(value, float) and value != twins.get(name):
            for limit in ("min", "max", "eps", "tiny"):
                if (value, twins.get(name)) == (
                    getattr(torch.finfo(dtype), limit),
                    getattr(torch.finfo(other_dtype), limit),
                ):
                    numbers[name] = dtype, other_dtype, limit
    return numbers


def _does_nothing(node: fx.Node) -> bool:
    """Return whether an operation is a cast that returned its argument."""
    if not operator_of(node).cast or not isinstance(node.args[0], fx.Node):
        return False
    argument_value, result_value = node.args[0].meta.get("val"), node.meta.get("val")
    return (
        isinstance(argument_value, torch.Tensor)
        and isinstance(result_value, torch.Tensor)
        and argument_value.dtype == result_value.dtype
        and argument_value.device == result_value.device
        and not any(value for name, value in arguments_of(node).items() if name in ("copy", "memory_format"))
    )


class DtypeProbe:
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

    def __init__(self, graph: fx.Graph, twin: fx.Graph, dtype: torch.dtype, other_dtype: torch.dtype) -> None:
        self.dtypes = dtype, other_dtype
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
                cast := _missing_cast(twin, next_node=node, value_of=self._node_of, dtypes=self.dtypes[::-1])
            ) is not None:
                self._add(cast, twin)
                twin = next(twins, None)
            elif (cast := _missing_cast(node, next_node=twin, value_of=self._twin_of, dtypes=self.dtypes)) is not None:
                self._add(node, cast)
                node = next(nodes, None)
            else:
                return False
        return node is twin is None

    def _add(self, node: fx.Node, twin: fx.Node) -> None:
        self.pairs.append((node, twin))
        self._twin_of[node], self._node_of[twin] = twin, node


def unsliced_node(node: fx.Node) -> fx.Node:
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


def _twin_arguments(node: fx.Node, twin: fx.Node) -> tuple[Any, ...]:
    """The arguments of a twin. A slice to the end says so, or leaves it out, as the node does."""
    to_end = (sys.maxsize,)
    if node.target is aten.slice.Tensor is twin.target:
        if len(node.args) == 3 and twin.args[3:] == to_end:
            return twin.args[:3]
        if len(twin.args) == 3 and node.args[3:] == to_end:
            return twin.args + to_end
    return twin.args


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
            lambda value: getattr(value, "shape", None),
            [value.meta.get("val") for value in (operation, *operation.all_input_nodes)],
        )
        for operation in (node, twin)
    ]
    return not any(operator_of(operation).cast for operation in (node, twin)) and bool(shapes[0] == shapes[1])


def _missing_cast(
    cast: fx.Node, next_node: fx.Node, value_of: dict[fx.Node, fx.Node], dtypes: tuple[torch.dtype, torch.dtype]
) -> fx.Node | None:
    """Put a cast into a graph that lacks it because it does nothing there, and return it.

    Args:
        cast: the cast, in the other graph.
        next_node: where to put it.
        value_of: node of the other graph → node of this one.
        dtypes: the dtypes of the model in the graph that has the cast, and in this one.

    Returns:
        the new node; None if ``cast`` is not a cast, or would have an effect.
    """
    if cast.target is not aten.to.dtype or unsliced_node(cast.all_input_nodes[0]) not in value_of:
        return None
    source = value_of[unsliced_node(cast.all_input_nodes[0])]
    requested_dtype = cast.args[1]
    dtype = dtypes[1] if requested_dtype == dtypes[0] else requested_dtype
    if source.meta["val"].dtype != dtype:
        return None
    with next_node.graph.inserting_before(next_node):
        new_cast = next_node.graph.call_function(aten.to.dtype, (source, dtype, *cast.args[2:]), dict(cast.kwargs))
    new_cast.meta = {key: cast.meta[key] for key in _PLACE if key in cast.meta}
    new_cast.meta |= {"val": source.meta["val"], SIZES: shape_of(source)}
    return new_cast
