"""Where the graphs of a model in training and in evaluation mode differ, as branches of its ``forward`` methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

import torch
from torch import fx, nn

from pipegraph.graph.aliasing import written_by
from pipegraph.graph.calls import CallTree, argument_place, call_tree, result_place, sorted_by_place
from pipegraph.graph.captured import STRUCTURE, ModuleEntry
from pipegraph.graph.internals import OpOverload, pytree
from pipegraph.graph.model_structure import is_layer_of_torch
from pipegraph.graph.nodes import any_layout, arguments_of, path_of, shape_of, source_line
from pipegraph.graph.operators import operator_of
from pipegraph.graph.symbolic_size import SymbolicSize

aten = torch.ops.aten

_Item = fx.Node | CallTree

# Arguments that say the mode, or follow it: the source writes ``self.training`` for them.
_FOLLOWS_MODE = ("train", "training", "dropout_p")


class OtherGraphError(Exception):
    """The two graphs differ by more than branches inside one ``forward``.

    Attributes:
        node: the first operation that is in one graph only.
    """

    def __init__(self, node: fx.Node) -> None:
        super().__init__(source_line(node))
        self.node = node


@dataclass(eq=False)
class ModeDifference:
    """Operations of one call that one mode runs and the other does not.

    Attributes:
        before: the operation of the training graph before which it lies.
        path: of the call.
        training, evaluation: its operations.
        joins: (value in training mode, value in evaluation mode) of what is read after it → where it is read. A value
            of evaluation mode that is made in a branch is a node of the other graph.
    """

    before: fx.Node
    path: tuple[tuple[str, str], ...]
    training: list[fx.Node]
    evaluation: list[fx.Node]
    joins: dict[tuple[fx.Node, fx.Node], list[tuple[fx.Node, int | None]]] = field(default_factory=dict)


class ModeComparison:
    """The graphs of a model in training and in evaluation mode, compared call by call.

    Attributes:
        differences: where they differ.
        in_every_mode: the operations of the training graph that do as in training mode in evaluation mode too.
        outputs: what evaluation mode returns of what training mode does, if it does not return all of it.

    Raises:
        OtherGraphError: there is a difference that is no branch.
    """

    def __init__(self, graph: fx.Graph, evaluation: fx.Graph, modules: Mapping[str, ModuleEntry]) -> None:
        self._graph = graph
        self._evaluation = evaluation
        self._modules = modules
        self._value: dict[fx.Node, fx.Node] = {}  # of evaluation mode → of training mode
        self.differences: list[ModeDifference] = []
        self._difference_of: dict[fx.Node, ModeDifference] = {}
        self.in_every_mode: list[fx.Node] = []
        self.outputs: Any = None
        inputs = {node.target: node for node in graph.find_nodes(op="placeholder")}
        state = {node.target: node for node in graph.find_nodes(op="get_attr")}
        for node in evaluation.nodes:
            same = inputs.get(node.target) if node.op == "placeholder" else state.get(node.target)
            if node.op in ("placeholder", "get_attr"):
                self._value[node] = same if same is not None else node
        self._last = next(node for node in graph.nodes if node.op == "output")
        self._compare()

    def _compare(self) -> None:
        """Find the branches and what is read after them."""
        own, other = (
            call_tree([node for node in graph.nodes if node.op == "call_function"])
            for graph in (self._graph, self._evaluation)
        )
        self._align(own.items, other.items, ())
        output = next(node for node in self._evaluation.nodes if node.op == "output")
        if _output_form(output) == _output_form(self._last):
            self._compare_arguments(self._last, output)
        else:
            self.outputs = self._chosen_outputs(output)
        for branch in self.differences:
            self._check(branch)

    def _align(self, own: Sequence[_Item], other: Sequence[_Item], path: tuple[tuple[str, str], ...]) -> None:
        """Pair what two calls run, and collect what only one of them runs."""
        every, own, other = own, *(list(filter(_does_something, items)) for items in (own, other))
        matcher = SequenceMatcher(None, list(map(_key, own)), list(map(_key, other)), autojunk=False)
        for kind, start, stop, other_start, other_stop in matcher.get_opcodes():
            if kind == "equal":
                for item, twin in zip(own[start:stop], other[other_start:other_stop], strict=True):
                    self._pair(item, twin)
                continue
            training = [node for item in own[start:stop] for node in _nodes(item)]
            evaluation = [node for item in other[other_start:other_stop] for node in _nodes(item)]
            before = next(_nodes(own[stop])) if stop < len(own) else list(_nodes(every[-1]))[-1].next
            self._add(ModeDifference(before, path, self._with_transparent(training, before), evaluation))

    def _with_transparent(self, nodes: list[fx.Node], before: fx.Node) -> list[fx.Node]:
        """Operations of a branch, and the dropouts of their results before ``before``."""
        found = list(nodes)
        node = nodes[0] if nodes else before
        while node is not before:
            if node not in nodes and _is_transparent(node) and node.args[0] in found:
                found.append(node)
            node = node.next
        return found

    def _add(self, branch: ModeDifference) -> None:
        self.differences.append(branch)
        self._difference_of |= dict.fromkeys((*branch.training, *branch.evaluation), branch)
        self._value |= {node: node for node in branch.evaluation}

    def _chosen_outputs(self, output: fx.Node) -> Any:
        """The outputs of evaluation mode as values of training mode, if it returns some of what that returns.

        What leads to other outputs alone runs in both modes.
        """
        returned = {self._effective(node): node for node in self._last.all_input_nodes}
        leaves: Any = output.args[0]
        chosen = [None if leaf is None else returned.get(self._effective(self.value_of(leaf))) for leaf in leaves]
        if any((leaf is None) != (node is None) for leaf, node in zip(leaves, chosen, strict=True)):
            raise OtherGraphError(self._last.all_input_nodes[-1])
        for branch in [each for each in self.differences if not each.evaluation and not each.joins]:
            readers = {user for node in branch.training for user in node.users}
            if readers <= {*branch.training, self._last}:
                self.differences.remove(branch)
        return pytree.tree_unflatten(chosen, output.meta[STRUCTURE])

    def _pair(self, item: _Item, twin: _Item) -> None:
        if isinstance(item, fx.Node) and isinstance(twin, fx.Node):
            self._value[twin] = item
            self._compare_arguments(item, twin)
            if _drops_or_trains(item) and _drops_or_trains(twin):
                self.in_every_mode.append(item)
        elif isinstance(item, CallTree) and isinstance(twin, CallTree):
            if self._follows_mode(item):
                self._pair_calls(item, twin)
            else:
                self._align(item.items, twin.items, path_of(next(item.nodes()))[: _depth(item)])

    def _pair_calls(self, own: CallTree, other: CallTree) -> None:
        """Pair what two calls of a module of torch.nn, which follows its mode itself, read and return."""
        calls = [_Call(tree, graph) for tree, graph in ((own, self._graph), (other, self._evaluation))]
        if any(len(one) != len(two) for one, two in zip(calls[0].values, calls[1].values, strict=True)):
            raise OtherGraphError(next(own.nodes()))
        (reads, results), (other_reads, other_results) = (call.values for call in calls)
        for value, twin in zip(reads, other_reads, strict=True):
            for node in own.nodes():
                if value in node.all_input_nodes:
                    self._compare_values(node, None, value, twin)
        self._value |= dict(zip(other_results, results, strict=True))

    def _compare_arguments(self, node: fx.Node, twin: fx.Node) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]
        twins = [leaf for leaf in pytree.tree_leaves((twin.args, twin.kwargs)) if isinstance(leaf, fx.Node)]
        if len(leaves) != len(twins):
            raise OtherGraphError(node if node.op == "call_function" else leaves[-1])
        for position, (value, other) in enumerate(zip(leaves, twins, strict=True)):
            self._compare_values(node, position, value, other)

    def _compare_values(self, reader: fx.Node, position: int | None, value: fx.Node, twin: fx.Node) -> None:
        """Note that a reader gets other values in the two modes, if it does."""
        other = self.value_of(twin)
        if self._effective(value) is self._effective(other):
            return
        ends = [self._difference_of[node] for node in (value, other) if node in self._difference_of]
        branch = max(ends, key=self.differences.index) if ends else None
        if branch is None:  # a choice between two values that both modes make
            path = _choice_path(reader, value, other)
            branch = ModeDifference(_beginning(reader, len(path)), path, [], [])
            self._add(branch)
        branch.joins.setdefault((value, other), []).append((reader, position))

    def value_of(self, twin: fx.Node) -> fx.Node:
        """The value of training mode that one of evaluation mode is; itself if training mode does not make it."""
        if twin not in self._value:
            twin = self._effective(twin)
        if twin not in self._value:
            raise OtherGraphError(twin)
        return self._value[twin]

    def _check(self, branch: ModeDifference) -> None:
        """Check that a branch reads nothing of other branches, and joins what can be joined."""
        inside = {*branch.training, *branch.evaluation}
        for node in inside:
            for parent in node.all_input_nodes:
                value = parent if node in branch.training else self.value_of(parent)
                if self._difference_of.get(value, branch) is not branch:
                    raise OtherGraphError(node)
            if "writes" in node.meta and node in branch.evaluation:
                raise OtherGraphError(node)
        for node in branch.training:
            for reader in node.users:
                if _is_transparent(reader) and self._difference_of.get(reader) is not branch:
                    raise OtherGraphError(reader)
        for value, other in branch.joins:
            outside = [node for node in (value, other) if self._difference_of.get(node, branch) is not branch]
            same = isinstance(value.meta["val"], torch.Tensor) and _form(value) == _form(other)
            if outside or not same:
                raise OtherGraphError(value)

    def _effective(self, node: fx.Node) -> fx.Node:
        """The value of which operations give nothing else in evaluation mode, or the buffer that they write into."""
        buffer = node
        while "writes" in buffer.meta:
            buffer = written_by(buffer)[0]
        if buffer.op == "get_attr":
            return buffer
        while node.op == "call_function" and _is_transparent(node) and node not in self._difference_of:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            node = source
        return node

    def _follows_mode(self, tree: CallTree) -> bool:
        """Return whether a call is of a module of torch.nn, which holds no module of the model's own."""
        called = (tree, *tree.descendants())
        modules = (type(self._modules[each.fqn].module) for each in called if each.fqn in self._modules)
        containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        own = type(self._modules[tree.fqn].module) if tree.fqn in self._modules else nn.Module
        return own not in containers and all(map(is_layer_of_torch, modules))


class _Call:
    """The values that a call reads and returns, in the order of its arguments and results."""

    def __init__(self, tree: CallTree, graph: fx.Graph) -> None:
        inside = set(tree.nodes())
        reads = dict.fromkeys(each for node in inside for each in node.all_input_nodes if each not in inside)
        position = {node: index for index, node in enumerate(graph.nodes)}
        foreign = sorted((node for node in reads if node.op != "get_attr"), key=position.__getitem__)
        made = [node for node in tree.nodes() if any(user not in inside for user in node.users)]
        self.values = (
            sorted_by_place(foreign, (argument_place(node, tree.call) for node in foreign)),
            sorted_by_place(made, (result_place(node, tree.call) for node in made)),
        )


def _choice_path(reader: fx.Node, value: fx.Node, other: fx.Node) -> tuple[tuple[str, str], ...]:
    """The innermost call around a reader in which both of two values are known, made there or given to it."""
    path = path_of(reader)
    depth = max(_common_depth(path, path_of(node)) for node in (value, other))
    while depth < len(path) and all(argument_place(node, path[depth][0]) is not None for node in (value, other)):
        depth += 1
    return path[:depth]


def _common_depth(path: Sequence[object], other: Sequence[object]) -> int:
    """How many calls two paths have in common."""
    pairs = zip(path, other, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _beginning(node: fx.Node, depth: int) -> fx.Node:
    """The first operation of the call, inside ``depth`` others, that an operation ran in; itself if it ran in none."""
    path = path_of(node)[: depth + 1]
    while len(path) > depth and path_of(node.prev)[: depth + 1] == path:
        node = node.prev
    return node


def _output_form(output: fx.Node) -> object:
    """How the outputs of a graph are nested, and which of them are None."""
    leaves: Any = output.args[0]
    return output.meta.get(STRUCTURE), [leaf is None for leaf in leaves]


def _nodes(item: _Item) -> Iterator[fx.Node]:
    return item.nodes() if isinstance(item, CallTree) else iter((item,))


def _depth(tree: CallTree) -> int:
    path = path_of(next(tree.nodes()))
    return next(depth for depth, (call, _) in enumerate(path, 1) if call == tree.call)


def _does_something(item: _Item) -> bool:
    """Return whether an item does something in both modes, or may do."""
    return isinstance(item, CallTree) or not _is_transparent(item)


def _is_transparent(node: fx.Node) -> bool:
    """Return whether an operation may be left out of evaluation mode.

    Such are a dropout that follows the mode, and ``contiguous()`` of an attention: the kernel of a mode may leave
    nothing to rearrange.
    """
    if node.target is aten.contiguous.default:
        source = node.args[0]
        while isinstance(source, fx.Node) and operator_of(source).view is not None:
            source = source.args[0]
        return isinstance(source, fx.Node) and operator_of(source).spelling == "attention"
    return operator_of(node).dropout and not node.meta["in_every_mode"]


def _drops_or_trains(node: fx.Node) -> bool:
    """Return whether an operation drops values, or computes statistics, as in training mode."""
    named = arguments_of(node) if isinstance(node.target, OpOverload) else {}
    return any(bool(named.get(name)) for name in _FOLLOWS_MODE)


def _key(item: _Item) -> object:
    """What two items have in common that do the same in two modes."""
    if isinstance(item, CallTree):
        return item.fqn
    return any_layout(item), repr(_plain_arguments(item))


def _plain_arguments(node: fx.Node) -> Any:
    """The arguments of an operation that are no values, without those that follow the mode."""
    named = arguments_of(node) if isinstance(node.target, OpOverload) else dict(enumerate(node.args))
    kept = {name: value for name, value in named.items() if name not in _FOLLOWS_MODE}
    if any_layout(node) is aten.reshape.default:  # a view in one mode may be a reshape in the other
        kept.pop("size", None)
        kept.pop("shape", None)
    return pytree.tree_map(_plain, kept)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, fx.Node):
        return "value"
    return leaf.text if isinstance(leaf, SymbolicSize) else leaf


def _form(node: fx.Node) -> tuple[Any, ...]:
    return node.meta["val"].dtype, tuple(shape_of(node))
