"""Write what a model does in training mode only and in evaluation mode only as branches of one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn

from pipegraph.graph.calls import copy_places, replace_node
from pipegraph.graph.captured import BRANCH, EVALUATION_OUTPUTS, BranchPart, ModuleEntry, by_mode
from pipegraph.graph.mode_comparison import ModeComparison
from pipegraph.graph.mode_differences import ModeDifference, OtherGraphError
from pipegraph.graph.model_structure import follows_mode, mentions_mode
from pipegraph.graph.nodes import SIZES, arguments_of, path_of, shape_of, source_line
from pipegraph.graph.operators import operator_of
from pipegraph.torch_private.export import call_name
from pipegraph.torch_private.modules import has_forward_hooks
from pipegraph.torch_private.pytrees import pytree

aten = torch.ops.aten


def may_differ_by_mode(graph: fx.Graph, modules: Mapping[str, ModuleEntry]) -> bool:
    """Return whether the model could do something in evaluation mode that its graph in training mode does not show."""
    drops = (operator_of(node).dropout or _attention_dropout(node) for node in _own_operations(graph, modules))
    hooked = (has_forward_hooks(entry.module) for entry in modules.values())  # as spectral_norm does
    return any(drops) or any(hooked) or any(map(mentions_mode, {type(entry.module) for entry in modules.values()}))


def mark_mode_differences(graph: fx.Graph, evaluation: fx.Graph, modules: Mapping[str, ModuleEntry]) -> None:
    """Mark dropouts that drop values in evaluation mode too, and make branches of operations that only one mode runs.

    before:  y = dropout(x, 0.1, True)      in ``evaluation`` as well
    after:   y = dropout(x, 0.1, True)      # in_every_mode: F.dropout(x), without training=self.training

    Raises:
        OtherGraphError: a difference cannot be written as a branch.
    """
    _mark_dropouts(_own_operations(graph, modules), _own_operations(evaluation, modules))
    merge_modes(graph, evaluation, modules)


def _mark_dropouts(training_nodes: Sequence[fx.Node], evaluation_nodes: Sequence[fx.Node]) -> None:
    """Mark the dropouts of both graphs that drop values in evaluation mode too.

    A dropout may be missing in evaluation mode; the next one must not be taken for it.
    """
    dropouts = _with_mode(training_nodes)
    for where, twins in _with_mode([node for node in evaluation_nodes if operator_of(node).dropout]).items():
        if any(twin.args[2] for twin in twins):
            nodes = dropouts.get(where, [])
            if len(nodes) != len(twins):
                raise OtherGraphError(twins[0])
            for node, twin in zip(nodes, twins, strict=True):
                node.meta["in_every_mode"] = twin.meta["in_every_mode"] = bool(twin.args[2])


def settle_fixed_modes(
    graph: fx.Graph, evaluation: fx.Graph | None, modules: Mapping[str, ModuleEntry], mode: Mapping[nn.Module, bool]
) -> None:
    """Keep switched off what the source switches off although the module around it is in training mode:
    ``F.dropout(x, training=False)`` is taken out, and ``F.batch_norm(x, mean, variance, training=False)`` is marked.
    What is not settled here follows the mode of the module.

    before:  y = dropout(x, 0.1, False);  z = relu(y)      in ``evaluation`` as well, if there is one
    after:   z = relu(x)

    Args:
        mode: in which each module was traced in ``graph``.
    """
    twins = _with_mode(_own_operations(evaluation, modules)) if evaluation is not None else {}
    for place, nodes in _with_mode(_own_operations(graph, modules)).items():
        twin_nodes = twins.get(place, [])
        for node, twin in zip(nodes, twin_nodes if len(twin_nodes) == len(nodes) else [None] * len(nodes), strict=True):
            around = modules[path_of(node)[-1][1] if path_of(node) else ""].module
            operations = {candidate for candidate in (node, twin) if candidate is not None}
            if not mode[around] or any(map(_is_on, operations)):
                continue
            for operation in operations:
                if operator_of(operation).dropout:
                    replace_node(operation, operation.args[0])
                else:
                    operation.meta["in_every_mode"] = True


def _with_mode(nodes: Sequence[fx.Node]) -> dict[object, list[fx.Node]]:
    """The dropouts and batch norms by the module that runs them and their line."""
    groups: dict[object, list[fx.Node]] = {}
    for node in nodes:
        if operator_of(node).dropout or node.target is aten.batch_norm.default:
            place = operator_of(node).dropout, tuple(fqn for _, fqn in path_of(node)), source_line(node)
            groups.setdefault(place, []).append(node)
    return groups


def _is_on(node: fx.Node) -> bool:
    """Return whether a dropout or a batch norm does as in training mode."""
    named = arguments_of(node)
    return bool(named.get("train", named.get("training", False)))


def _own_operations(graph: fx.Graph, modules: Mapping[str, ModuleEntry]) -> list[fx.Node]:
    """The operations outside modules of torch.nn, which follow their mode themselves."""
    return [node for node in graph.nodes if node.op == "call_function" and not _in_torch_module(node, modules)]


def _in_torch_module(node: fx.Node, modules: Mapping[str, ModuleEntry]) -> bool:
    path = path_of(node)
    owner = modules.get(path[-1][1]) if path else None
    return owner is not None and follows_mode(owner.module)


def _attention_dropout(node: fx.Node) -> bool:
    attention = node.target is aten.scaled_dot_product_attention.default
    return attention and bool(arguments_of(node).get("dropout_p", 0.0))


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
        home: dict[fx.Node, ModeDifference] = {}
        for number, branch in enumerate(self._comparison.differences):
            for node in branch.training:
                home[node] = branch
                if not branch.runs_in_both:
                    node.meta[BRANCH] = BranchPart(number, True)
            for node in branch.evaluation:
                copies[node] = self._copy(node, branch, number, copies)
                home[copies[node]] = branch
        self._return_more(copies)
        for number, branch in enumerate(self._comparison.differences):
            for (value, twin), readers in branch.phis.items():
                twin = self._state(twin, branch) if twin.op == "get_attr" else copies.get(twin, twin)
                join = self._join(branch, number, value, twin)
                for reader, position in readers:
                    _replace_argument(reader, position, value, join)
                for node in (value, twin):
                    for reader in [user for user in node.users if home.get(user, branch) is not branch]:
                        if home.get(node) is branch:  # another branch reads what this one makes
                            reader.replace_input_with(node, join)

    def _return_more(self, copies: Mapping[fx.Node, fx.Node]) -> None:
        """Return what evaluation mode alone returns, too."""
        (output,) = self._graph.find_nodes(op="output")
        if self._comparison.outputs is not None:
            more_outputs = [copies.get(node, node) for node in self._comparison.more_outputs]
            output.args = ((*output.args[0], *more_outputs),)
            output.meta[EVALUATION_OUTPUTS] = self._comparison.outputs

    def _copy(self, node: fx.Node, branch: ModeDifference, number: int, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        def value(argument: fx.Node) -> fx.Node:
            source = self._comparison.value_of(argument)
            return self._state(source, branch) if source.op == "get_attr" else copies.get(source, source)

        with self._graph.inserting_before(branch.anchor):
            copy = self._graph.node_copy(node, value)
        inner = path_of(node)[len(branch.path) :]
        copy.meta["path"] = (*branch.path, *((_in_evaluation(call), fqn) for call, fqn in inner))
        if not branch.runs_in_both:
            copy.meta[BRANCH] = BranchPart(number, False)
        for key in ("argument_of", "result_of"):
            copy.meta.pop(key, None)
        calls = {call_name(call) for call, _ in inner}
        for twin in (node, *node.all_input_nodes):
            target = copy if twin is node else value(twin)
            for key in ("argument_of", "result_of"):
                places = {
                    _in_evaluation(call): place for call, place in twin.meta.get(key, {}).items() if call in calls
                }
                target.meta[key] = {**target.meta.get(key, {}), **places}
        return copy

    def _state(self, node: fx.Node, branch: ModeDifference) -> fx.Node:
        """A parameter, buffer or constant, which evaluation mode alone may read."""
        if node.graph is self._graph:
            return node
        state = next((twin for twin in self._graph.nodes if (twin.op, twin.target) == (node.op, node.target)), None)
        if state is None:
            with self._graph.inserting_before(branch.anchor):
                state = self._graph.node_copy(node)
        return state

    def _join(self, branch: ModeDifference, number: int, value: fx.Node, twin: fx.Node) -> fx.Node:
        with self._graph.inserting_before(branch.anchor):
            join = self._graph.call_function(by_mode, (value, twin))
        regions = branch.anchor.meta.get("regions", ()) if not branch.training else branch.training[0].meta["regions"]
        join.meta = {
            "val": value.meta["val"],
            SIZES: shape_of(value),
            "path": branch.path,
            "regions": regions,
            "in_every_mode": False,
            "stack_trace": _source(branch, value, twin),
            "requires_grad": any(node.meta.get("requires_grad", False) for node in (value, twin)),
            "cut_off": False,
            BRANCH: BranchPart(number, None),
        }
        copy_places(value, join)
        for call, _ in branch.path:  # these return what is joined
            value.meta.get("result_of", {}).pop(call_name(call), None)
        return join


def _source(branch: ModeDifference, value: fx.Node, twin: fx.Node) -> str:
    """The lines of source that made a joined value: of one that is made in the branch, if one is."""
    inside = [node for node in (value, twin) if BRANCH in node.meta]
    operation = next((node for node in (*inside, value, branch.anchor) if node.op == "call_function"), None)
    return str(operation.meta["stack_trace"]) if operation is not None else ""


def _in_evaluation(call: str) -> str:
    """The name of a call that evaluation mode alone makes."""
    return f"{call}@evaluation"


def _replace_argument(reader: fx.Node, position: int | None, value: fx.Node, join: fx.Node) -> None:
    """Let a reader read a joined value, at one place or everywhere."""
    if position is None:
        reader.replace_input_with(value, join)
        return
    leaves, form = pytree.tree_flatten((reader.args, reader.kwargs))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    leaves[places[position]] = join
    reader.args, reader.kwargs = pytree.tree_unflatten(leaves, form)
