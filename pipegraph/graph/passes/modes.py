"""Write what a model does in training mode only and in evaluation mode only as branches of one graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

import torch
from torch import fx, nn

from pipegraph.errors import is_user_file
from pipegraph.graph.calls import (
    RETURNED,
    CallTree,
    FunctionRun,
    argument_place,
    call_tree,
    copy_places,
    functions_of,
    replace_node,
    result_place,
    sorted_by_place,
)
from pipegraph.graph.captured import BRANCH, EVALUATION_OUTPUTS, STRUCTURE, BranchPart, ModuleEntry, by_mode
from pipegraph.graph.mode_differences import (
    ModeDifference,
    ModeDifferences,
    OtherGraphError,
    is_transparent,
    same_form,
    written_value,
)
from pipegraph.graph.model_structure import follows_mode, mentions_mode
from pipegraph.graph.nodes import SIZES, any_layout, arguments_of, path_of, shape_of, source_line, source_lines
from pipegraph.graph.operators import MODE_ARGUMENTS, operator_of
from pipegraph.graph.symbolic_size import SymbolicSize
from pipegraph.torch_private.export import call_name
from pipegraph.torch_private.modules import has_forward_hooks
from pipegraph.torch_private.operators import OpOverload
from pipegraph.torch_private.pytrees import pytree

# ---- mode comparison -------------------------------------------------------------------------------------------------
# Where the graphs of a model in training and in evaluation mode differ, as branches of its ``forward`` methods.


_Item = fx.Node | CallTree


class ModeComparison:
    """The graphs of a model in training and in evaluation mode, compared call by call.

    Attributes:
        differences: where they differ.
        in_every_mode: the operations of the training graph that act as in training mode in evaluation mode, too.
        outputs: what evaluation mode returns, in its own nesting, if that differs from training mode. The leaves are
            positions among the outputs of the training graph, followed by `more_outputs`.
        more_outputs: the values that only evaluation mode returns.

    Raises:
        OtherGraphError: a difference cannot be a branch.
    """

    def __init__(self, graph: fx.Graph, evaluation: fx.Graph, modules: Mapping[str, ModuleEntry]) -> None:
        self._graph = graph
        self._evaluation = evaluation
        self._modules = modules
        self._differences = ModeDifferences(graph, self._is_own)
        self.in_every_mode: list[fx.Node] = []
        self.outputs: Any = None
        self.more_outputs: list[fx.Node] = []
        inputs = {node.target: node for node in graph.find_nodes(op="placeholder")}
        state = {node.target: node for node in graph.find_nodes(op="get_attr")}
        for node in evaluation.nodes:
            training_node = inputs.get(node.target) if node.op == "placeholder" else state.get(node.target)
            if node.op in ("placeholder", "get_attr"):
                self._differences.pair(node, training_node if training_node is not None else node)
        self._last = next(node for node in graph.nodes if node.op == "output")
        self._compare()

    @property
    def differences(self) -> Sequence[ModeDifference]:
        return self._differences.differences

    def value_of(self, twin: fx.Node) -> fx.Node:
        """The value of training mode that one of evaluation mode is; itself if training mode does not make it."""
        return self._differences.value_of(twin)

    def _compare(self) -> None:
        """Find the branches and what is read after them."""
        training_tree, evaluation_tree = (
            call_tree([node for node in graph.nodes if node.op == "call_function"])
            for graph in (self._graph, self._evaluation)
        )
        self._align(training_tree.items, evaluation_tree.items, ())
        self._compare_outputs(next(node for node in self._evaluation.nodes if node.op == "output"))
        self._differences.settle()
        for difference in self._differences.differences:
            while (call := self._call_around(difference)) is not None:
                difference.path = (*difference.path, call)

    def _call_around(self, difference: ModeDifference) -> tuple[str, str] | None:
        """The call inside the path of a difference that is all of it, of a module that asks for its mode, and that
        returns in evaluation mode what it is given.

        before:  if self.training: x = self.drop_path(x)
        after:   x = self.drop_path(x)      # whose class asks for the mode, as in the source
        """
        nodes, depth = difference.training, len(difference.path)
        calls = {path_of(node)[depth : depth + 1] for node in nodes}
        if difference.evaluation or difference.runs_in_both or len(calls) != 1 or calls == {()}:
            return None
        ((call,),) = calls
        readers = {reader for uses in difference.phis.values() for reader, _ in uses}
        passes_on = all(
            result_place(value, call[0]) is not None
            and argument_place(evaluation_value, call[0]) is not None
            and readers.union(nodes).issuperset(value.users)
            for value, evaluation_value in difference.phis
        )
        covers_call = difference.phis and nodes[-1].next is difference.anchor
        return call if covers_call and passes_on and mentions_mode(type(self._modules[call[1]].module)) else None

    def _compare_outputs(self, output: fx.Node) -> None:
        """Compare what the modes return.

        If that is not nested alike, or not of the same form, an output of evaluation mode is one that training mode
        returns, too; or stands in the place of one of the same form that evaluation mode does not return; or it is an
        output more, which both modes compute.
        """
        outputs: Any = self._last.args[0]
        leaves: Any = output.args[0]
        nested_alike = self._last.meta.get(STRUCTURE) == output.meta.get(STRUCTURE)
        if nested_alike and all(map(_same_leaf, outputs, leaves)):
            self._compare_arguments(self._last, output)
            return
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, fx.Node):
                raise OtherGraphError(self._last.all_input_nodes[-1])
        values = [None if leaf is None else self.value_of(leaf) for leaf in leaves]
        returned = {self._differences.effective(node): place for place, node in enumerate(outputs) if node is not None}
        chosen = [None if value is None else returned.get(self._differences.effective(value)) for value in values]
        for index, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
            if value is not None and chosen[index] is None:
                chosen[index] = self._place_of(leaf, value, outputs, chosen)
        if all(place is None for place in chosen):
            raise OtherGraphError(self._last.all_input_nodes[-1])
        for place, node in enumerate(outputs):
            if place not in chosen:
                self._differences.run_in_both(node)
        self.outputs = pytree.tree_unflatten(chosen, output.meta[STRUCTURE])

    def _place_of(self, leaf: fx.Node, value: fx.Node, outputs: Sequence[Any], chosen: Sequence[int | None]) -> int:
        """The place among the outputs of one that evaluation mode alone returns."""
        nodes = [node for node in outputs if node is not None]
        for place, node in enumerate(outputs):
            if node is not None and place not in chosen and outputs.count(node) == 1 and same_form(node, value):
                self._differences.compare(self._last, nodes.index(node), node, leaf)
                return place
        self._differences.run_in_both(value)
        self.more_outputs.append(value)
        return len(outputs) + len(self.more_outputs) - 1

    def _is_own(self, node: fx.Node) -> bool:
        """Return whether the model itself runs an operation, and no layer of torch.nn."""
        path = path_of(node)
        return not path or not follows_mode(self._modules[path[-1][1]].module)

    def _align(self, call_items: Sequence[_Item], twins: Sequence[_Item], path: tuple[tuple[str, str], ...]) -> None:
        """Pair what two calls run, and collect what only one of them runs."""
        every, call_items, twins = call_items, *(list(filter(_does_something, items)) for items in (call_items, twins))
        matcher = SequenceMatcher(None, list(map(_key, call_items)), list(map(_key, twins)), autojunk=False)
        for kind, start, stop, other_start, other_stop in matcher.get_opcodes():
            if kind == "equal":
                for item, twin in zip(call_items[start:stop], twins[other_start:other_stop], strict=True):
                    self._pair(item, twin)
                continue
            training = [node for item in call_items[start:stop] for node in _nodes(item)]
            evaluation = [node for item in twins[other_start:other_stop] for node in _nodes(item)]
            anchor = next(_nodes(call_items[stop])) if stop < len(call_items) else list(_nodes(every[-1]))[-1].next
            self._differences.add(ModeDifference(anchor, path, self._with_transparent(training, anchor), evaluation))

    def _with_transparent(self, nodes: list[fx.Node], anchor: fx.Node) -> list[fx.Node]:
        """Operations of a branch, and the dropouts of their results before ``anchor``."""
        operations = list(nodes)
        node = nodes[0] if nodes else anchor
        while node is not anchor:
            if node not in nodes and is_transparent(node) and node.args[0] in operations:
                operations.append(node)
            node = node.next
        return operations

    def _pair(self, item: _Item, twin: _Item) -> None:
        if isinstance(item, fx.Node) and isinstance(twin, fx.Node):
            self._differences.pair(twin, item)
            self._compare_arguments(item, twin)
            if _drops_or_trains(item) and _drops_or_trains(twin):
                self.in_every_mode.append(item)
        elif isinstance(item, CallTree) and isinstance(twin, CallTree):
            if self._follows_mode(item):
                self._pair_calls(item, twin)
            else:
                self._align(item.items, twin.items, path_of(next(item.nodes()))[: _depth(item)])

    def _pair_calls(self, training_call: CallTree, twin_call: CallTree) -> None:
        """Pair what two calls of a module of torch.nn, which follows its mode itself, read and return."""
        calls = [_Call(tree, graph) for tree, graph in ((training_call, self._graph), (twin_call, self._evaluation))]
        if any(len(values) != len(two) for values, two in zip(calls[0].values, calls[1].values, strict=True)):
            raise OtherGraphError(next(training_call.nodes()))
        (reads, results), (other_reads, other_results) = (call.values for call in calls)
        for value, twin in zip(reads, other_reads, strict=True):
            for node in training_call.nodes():
                if value in node.all_input_nodes:
                    self._differences.compare(node, None, value, twin)
        for result, twin in zip(results, other_results, strict=True):
            self._differences.pair(twin, result)

    def _compare_arguments(self, node: fx.Node, twin: fx.Node) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]
        twins = [leaf for leaf in pytree.tree_leaves((twin.args, twin.kwargs)) if isinstance(leaf, fx.Node)]
        if len(leaves) != len(twins):
            raise OtherGraphError(node)
        for position, (value, twin_value) in enumerate(zip(leaves, twins, strict=True)):
            self._differences.compare(node, position, value, twin_value)

    def _follows_mode(self, tree: CallTree) -> bool:
        """Return whether a call is of a module of torch.nn, which holds no module of the model's own."""
        called = (tree, *tree.descendants())
        modules = (self._modules[call.fqn].module for call in called if call.fqn in self._modules)
        containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        module_class = type(self._modules[tree.fqn].module) if tree.fqn in self._modules else nn.Module
        return module_class not in containers and all(map(follows_mode, modules))


class _Call:
    """The values that a call reads and returns, in the order of its arguments and results. State is not among them,
    nor what training mode wrote into it: the second call of a batch norm reads the count that the first one raised.
    """

    def __init__(self, tree: CallTree, graph: fx.Graph) -> None:
        inside = set(tree.nodes())
        reads = dict.fromkeys(parent for node in inside for parent in node.all_input_nodes if parent not in inside)
        position = {node: index for index, node in enumerate(graph.nodes)}
        foreign = sorted(filter(_is_no_state, reads), key=position.__getitem__)
        values = [node for node in filter(_is_no_state, tree.nodes()) if any(user not in inside for user in node.users)]
        self.values = (
            sorted_by_place(foreign, (argument_place(node, tree.call) for node in foreign)),
            sorted_by_place(values, (result_place(node, tree.call) for node in values)),
        )


def _is_no_state(node: fx.Node) -> bool:
    return written_value(node).op != "get_attr"


def _nodes(item: _Item) -> Iterator[fx.Node]:
    return item.nodes() if isinstance(item, CallTree) else iter((item,))


def _depth(tree: CallTree) -> int:
    path = path_of(next(tree.nodes()))
    return next(depth for depth, (call, _) in enumerate(path, 1) if call == tree.call)


def _does_something(item: _Item) -> bool:
    """Return whether an item does something in both modes, or may do."""
    return isinstance(item, CallTree) or not is_transparent(item)


def _drops_or_trains(node: fx.Node) -> bool:
    """Return whether an operation drops values, or computes statistics, as in training mode."""
    named = arguments_of(node) if isinstance(node.target, OpOverload) else {}
    return any(bool(named.get(name)) for name in MODE_ARGUMENTS)


def _key(item: _Item) -> object:
    """What two items have in common that do the same in two modes."""
    if isinstance(item, CallTree):
        return item.fqn
    return any_layout(item), repr(_plain_arguments(item))


def _plain_arguments(node: fx.Node) -> Any:
    """The arguments of an operation that are no values, without those that follow the mode."""
    named = arguments_of(node) if isinstance(node.target, OpOverload) else dict(enumerate(node.args))
    arguments = {name: value for name, value in named.items() if name not in MODE_ARGUMENTS}
    if any_layout(node) is aten.reshape.default:  # a view in one mode may be a reshape in the other
        arguments.pop("size", None)
        arguments.pop("shape", None)
    return pytree.tree_map(_plain, arguments)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, fx.Node):
        return "value"
    return leaf.text if isinstance(leaf, SymbolicSize) else leaf


def _same_leaf(leaf: Any, twin_leaf: Any) -> bool:
    """Return whether two outputs are of the same form, or the same constant."""
    if isinstance(leaf, fx.Node) and isinstance(twin_leaf, fx.Node):
        return same_form(leaf, twin_leaf)
    return type(leaf) is type(twin_leaf) and leaf == twin_leaf


# ---- modes -----------------------------------------------------------------------------------------------------------


aten = torch.ops.aten


def may_differ_by_mode(graph: fx.Graph, modules: Mapping[str, ModuleEntry]) -> bool:
    """Return whether the model could do something in evaluation mode that its graph in training mode does not show."""
    drops = (operator_of(node).dropout or _drops_or_trains(node) for node in _own_operations(graph, modules))
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


def mark_lines_on(graph: fx.Graph, modules: Mapping[str, ModuleEntry], lines: Set[str]) -> None:
    """Mark the operations that do in evaluation mode as in training mode.

    before:  y = dropout(x, 0.1, True)
    after:   y = dropout(x, 0.1, True)      # in_every_mode: F.dropout(x), without training=self.training

    Args:
        lines: of these operations, ``model.py:12`` with the whole path.
    """
    for node in _own_operations(graph, modules):
        line = next((f"{path}:{number}" for path, number in source_lines(node) if is_user_file(path)), "")
        if line in lines and _drops_or_trains(node):
            node.meta["in_every_mode"] = True


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
        for key in ("argument_of", "result_of", "variables"):
            copy.meta.pop(key, None)
        calls = {call_name(call) for call, _ in inner}
        for twin in (node, *node.all_input_nodes):
            target = copy if twin is node else value(twin)
            for key in ("argument_of", "result_of", "variables"):
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
            "functions": _common_functions(value, twin),
            "regions": regions,
            "in_every_mode": False,
            "stack_trace": _source(branch, value, twin),
            "requires_grad": any(node.meta.get("requires_grad", False) for node in (value, twin)),
            "cut_off": False,
            BRANCH: BranchPart(number, None),
        }
        copy_places(value, join)
        for call, _ in branch.path:  # these return what is joined
            for key in ("result_of", "variables"):
                value.meta.get(key, {}).pop(call_name(call), None)
        for run in functions_of(join):
            places = value.meta.get("variables", {}).get(run.key, ())
            returned = tuple(place for place in places if place.name == RETURNED)
            if places:  # an argument of the function stays one
                value.meta["variables"][run.key] = tuple(place for place in places if place not in returned)
                join.meta["variables"][run.key] = returned
        return join


def _common_functions(value: fx.Node, twin: fx.Node) -> tuple[FunctionRun, ...]:
    """The calls of functions in which both modes compute a value. The modes may return other values from one."""
    pairs = zip(functions_of(value), functions_of(twin), strict=False)
    return tuple(run for run, twin_run in takewhile(lambda pair: pair[0].key == pair[1].key, pairs))


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
