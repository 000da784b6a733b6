"""Put what a model does in evaluation mode only into its graph in training mode, as branches."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from pipegraph.graph.call_arguments import copy_places
from pipegraph.graph.captured import BRANCH, BranchPart, ModuleEntry, by_mode
from pipegraph.graph.internals import call_name, pytree
from pipegraph.graph.mode_comparison import ModeComparison, ModeDifference
from pipegraph.graph.nodes import SIZES, path_of, shape_of


def merge_modes(graph: fx.Graph, evaluation: fx.Graph, modules: Mapping[str, ModuleEntry]) -> None:
    """Add the operations that run in evaluation mode only, and mark those that run in training mode only.

    A branch lies in one call of a module. Its operations have ``meta["branch"]``; what is read after it is joined.

    before:  h = tanh(x);  y = mul(h, 2)                     in ``evaluation``: y = mul(x, 2)
    after:   h = tanh(x);  j = by_mode(h, x);  y = mul(j, 2)         # if self.training: x = x.tanh()

    Raises:
        OtherGraphError: that is not all by which they differ. The graph is as it was.
    """
    _ModeMerge(graph, ModeComparison(graph, evaluation, modules)).apply()


class _ModeMerge:
    """Writes the differences of two graphs into one."""

    def __init__(self, graph: fx.Graph, comparison: ModeComparison) -> None:
        self._graph = graph
        self._comparison = comparison

    def apply(self) -> None:
        """Write the branches into the graph."""
        for node in self._comparison.in_every_mode:
            node.meta["in_every_mode"] = True
        copies: dict[fx.Node, fx.Node] = {}
        for number, branch in enumerate(self._comparison.differences):
            for node in branch.training:
                node.meta[BRANCH] = BranchPart(number, True)
            for node in branch.evaluation:
                copies[node] = self._copy(node, branch, number, copies)
        for number, branch in enumerate(self._comparison.differences):
            for (value, other), readers in branch.joins.items():
                other = self._state(other, branch) if other.op == "get_attr" else copies.get(other, other)
                join = self._join(branch, number, value, other)
                for reader, position in readers:
                    _replace(reader, position, value, join)

    def _copy(self, node: fx.Node, branch: ModeDifference, number: int, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        def value(argument: fx.Node) -> fx.Node:
            own = self._comparison.value_of(argument)
            return self._state(own, branch) if own.op == "get_attr" else copies.get(own, own)

        with self._graph.inserting_before(branch.before):
            made = self._graph.node_copy(node, value)
        inner = path_of(node)[len(branch.path) :]
        made.meta["path"] = (*branch.path, *((_in_evaluation(call), fqn) for call, fqn in inner))
        made.meta[BRANCH] = BranchPart(number, False)
        for key in ("argument_of", "result_of"):
            made.meta.pop(key, None)
        calls = {call_name(call) for call, _ in inner}
        for twin in (node, *node.all_input_nodes):
            own = made if twin is node else value(twin)
            for key in ("argument_of", "result_of"):
                places = {
                    _in_evaluation(call): place for call, place in twin.meta.get(key, {}).items() if call in calls
                }
                own.meta[key] = {**own.meta.get(key, {}), **places}
        return made

    def _state(self, node: fx.Node, branch: ModeDifference) -> fx.Node:
        """A parameter, buffer or constant, which evaluation mode alone may read."""
        if node.graph is self._graph:
            return node
        found = next((each for each in self._graph.nodes if (each.op, each.target) == (node.op, node.target)), None)
        if found is None:
            with self._graph.inserting_before(branch.before):
                found = self._graph.node_copy(node)
        return found

    def _join(self, branch: ModeDifference, number: int, value: fx.Node, other: fx.Node) -> fx.Node:
        with self._graph.inserting_before(branch.before):
            join = self._graph.call_function(by_mode, (value, other))
        regions = branch.before.meta.get("regions", ()) if not branch.training else branch.training[0].meta["regions"]
        join.meta = {
            "val": value.meta["val"],
            SIZES: shape_of(value),
            "path": branch.path,
            "regions": regions,
            "in_every_mode": False,
            "stack_trace": _source(branch, value, other),
            "requires_grad": any(each.meta.get("requires_grad", False) for each in (value, other)),
            "cut_off": False,
            BRANCH: BranchPart(number, None),
        }
        copy_places(value, join)
        return join


def _source(branch: ModeDifference, value: fx.Node, other: fx.Node) -> str:
    """The lines of source that made a joined value: of one that is made in the branch, if one is."""
    inside = [node for node in (value, other) if BRANCH in node.meta]
    made = next((node for node in (*inside, value, branch.before) if node.op == "call_function"), None)
    return str(made.meta["stack_trace"]) if made is not None else ""


def _in_evaluation(call: str) -> str:
    """The name of a call that evaluation mode alone makes."""
    return f"{call}@evaluation"


def _replace(reader: fx.Node, position: int | None, value: fx.Node, join: fx.Node) -> None:
    """Let a reader read a joined value, at one place or everywhere."""
    if position is None:
        reader.replace_input_with(value, join)
        return
    leaves, form = pytree.tree_flatten((reader.args, reader.kwargs))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    leaves[places[position]] = join
    reader.args, reader.kwargs = pytree.tree_unflatten(leaves, form)
