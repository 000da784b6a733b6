"""A joint graph divided into F, I, W and B: pure functions, by what each of their results can be reached from.

F  primals                              ─▶ outputs, what was written, saved
I  saved, tangents                      ─▶ gradients of inputs, what W needs of I's
W  saved, tangents, what W needs of I's ─▶ gradients of parameters
B  saved, tangents                      ─▶ all gradients
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from pipegraph.kernels import internals
from pipegraph.kernels.graphs.block_operation import OPERATION, KernelGraph, is_random
from pipegraph.kernels.graphs.joint_graph import JointGraph

aten = torch.ops.aten

_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default}
_HEAVY = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "convolution_backward"}
_HEAVY |= {"embedding_dense_backward", "_foreach", "call"}


@dataclass(frozen=True)
class BackwardGraphs:
    """The backward for one choice of outputs that a gradient comes from.

    `input` is None where no input has a gradient: `weight` then does everything. `gradients` names that of each primal.
    """

    input: KernelGraph | None
    weight: KernelGraph | None
    whole: KernelGraph
    gradients: tuple[str | None, ...]

    @property
    def graphs(self) -> list[KernelGraph]:
        """Those that there are."""
        return [part for part in (self.input, self.weight, self.whole) if part is not None]


def saved_values(joint: JointGraph, recompute: str) -> set[fx.Node]:
    """The values that F keeps for the backward, beside primals.

    What is random, what a block gave and what other ranks had a part in always is: a backward does not wait for them to
    compute it again. A view never is, but what it is a view of: both keep the same memory, and a view costs nothing.
    Nor is a constant, such as the zeros that a gradient is added up in.

    "block" is for a graph that calls no other block; one that does is no block to compute again.
    """
    forward = _forward_nodes(joint)
    if recompute == "none":
        return {node for node in forward if is_random(node) or (node.all_input_nodes and not is_view(node))}
    kept = {node for node in forward if is_random(node) or node.target is OPERATION or _is_waited(node)}
    kept |= {user for index in joint.written for user in joint.primals[index].users}  # what was there before
    if recompute == "block" and any(node.target is OPERATION for node in forward):
        recompute = "min-cut"
    kept |= {user for node in list(kept) for user in node.users if user.target is operator.getitem}
    if recompute == "block":
        return kept
    copied = fx.Graph()
    copied.output(copied.graph_copy(joint.module.graph, {}))
    names = internals.min_cut(fx.GraphModule(joint.module, copied), len(joint.outputs) + len(joint.written))
    bases = {_base(node) for node in forward if node.name in names}
    return kept | {node for node in bases if node.op == "call_function"}


def forward_graph(joint: JointGraph, kept: Collection[fx.Node], backward: Iterable[KernelGraph]) -> KernelGraph:
    """F: it gives those of the values `kept` that the parts of the backward read, beside the outputs."""
    nodes = {node.name: node for node in kept}
    saved = [nodes[name] for part in backward for name in part.inputs if name in nodes]
    return _extract(joint, (), [*joint.outputs, *joint.written.values(), *saved])


def backward_graphs(
    joint: JointGraph, saved: Collection[fx.Node], is_input: Sequence[bool], mask: Sequence[bool]
) -> BackwardGraphs:
    """The backward where a gradient comes from the outputs that are `mask`."""
    tangents = [node for node, here in zip(joint.tangents, mask, strict=True) if node is not None and here]
    absent = [node for node, here in zip(joint.tangents, mask, strict=True) if node is not None and not here]
    reached = _reached(tangents)
    gradients = [node if node in reached else None for node in joint.gradients]
    inputs = [node for node, wanted in zip(gradients, is_input, strict=True) if wanted and node is not None]
    weights = [node for node, wanted in zip(gradients, is_input, strict=True) if not wanted and node is not None]
    available = {*saved, *tangents}
    own = _own(gradients, weights)
    names = tuple(None if node is None else node.name for node in gradients)
    whole = _extract(joint, available, _found(gradients), own, absent)
    if not inputs:
        return BackwardGraphs(None, whole if weights else None, whole, names)
    of_input = _ancestors(inputs, available)
    # A gradient that needs no product of matrices (of a norm's weight) costs less where its factors are at hand.
    light = [node for node in weights if not any(map(_is_heavy, _ancestors([node], available) - of_input))]
    of_input = _ancestors([*inputs, *light], available)
    heavy = [node for node in weights if node not in light]
    needed = _frontier(heavy, of_input, available)
    own -= {node for node in weights if _base(node) in needed}
    return BackwardGraphs(
        _extract(joint, available, [*inputs, *light, *needed], own, absent),
        _extract(joint, available | set(needed), heavy, own, absent) if heavy else None,
        whole,
        names,
    )


def _found(nodes: Iterable[fx.Node | None]) -> list[fx.Node]:
    return [node for node in nodes if node is not None]


def _forward_nodes(joint: JointGraph) -> set[fx.Node]:
    """Whatever does not depend on a tangent."""
    behind = _reached(_found(joint.tangents))
    return {node for node in joint.module.graph.nodes if node not in behind and node.op == "call_function"}


def _reached(starts: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.users
    return found


def _ancestors(ends: Iterable[fx.Node], available: Collection[fx.Node]) -> set[fx.Node]:
    """What has to be computed for `ends`, themselves included."""
    found: set[fx.Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and node not in found and node not in available:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _frontier(ends: Iterable[fx.Node], of_input: set[fx.Node], available: Collection[fx.Node]) -> list[fx.Node]:
    """The values of I that `ends` are computed from. Not a view, but what it is a view of: making it again is free."""
    needed: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node in seen or node in available or node.op != "call_function":
            continue
        seen.add(node)
        item_of_input = node.target is operator.getitem and node.args[0] in of_input
        if (node in of_input or item_of_input) and not is_view(node):
            needed[node] = None
        else:
            waiting += node.all_input_nodes
    return list(needed)


def _own(gradients: Sequence[fx.Node | None], weights: Collection[fx.Node]) -> set[fx.Node]:
    """The gradients of parameters that share no memory with another result, so that they may become `.grad`."""
    bases: dict[fx.Node, int] = {}
    for node in _found(gradients):
        bases[_base(node)] = bases.get(_base(node), 0) + 1
    own = set()
    for node in weights:
        base = _base(node)
        value, whole = node.meta.get("val"), base.meta.get("val")
        same_size = value is not None and whole is not None and value.numel() == whole.numel()
        if base.op == "call_function" and bases[base] == 1 and same_size:
            own.add(node)
    return own | (set(_found(gradients)) - set(weights))


def _base(node: fx.Node) -> fx.Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_view(node: fx.Node) -> bool:
    """Whether its result shares the memory of its first argument."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, internals.OpOverload):
        return False
    return target in _VIEWS or internals.is_view_operation(target)


def _is_waited(node: fx.Node) -> bool:
    """Whether it is what a collective gave, which is behind the wait for it."""
    return internals.is_collective(node) and node.target is torch.ops._c10d_functional.wait_tensor.default


def _is_heavy(node: fx.Node) -> bool:
    target = node.target
    if internals.is_collective(node):  # I is not to wait for what only a weight's gradient needs
        return True
    return isinstance(target, internals.OpOverload) and target.overloadpacket.__name__ in _HEAVY


def _extract(
    joint: JointGraph,
    available: Collection[fx.Node],
    outputs: Iterable[fx.Node],
    own: Collection[fx.Node] | None = None,
    absent: Collection[fx.Node] = (),
) -> KernelGraph:
    """The graph that computes `outputs` from placeholders and what is `available`.

    An output that is not in `own` is copied; a placeholder that is `absent` is zeros.
    """
    ends = list(dict.fromkeys(outputs))
    wanted = _ancestors(ends, available)
    read = {node for each in wanted for node in each.all_input_nodes} - wanted | (set(ends) - wanted)
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    inputs: list[str] = []
    for node in joint.module.graph.nodes:
        if node in read and node.op != "get_attr" and node not in absent:
            values[node] = graph.placeholder(node.name)
            values[node].meta = node.meta
            inputs.append(node.name)
    for node in joint.module.graph.nodes:
        if node in absent and node in read:
            values[node] = _zeros(graph, node)
        elif node in wanted or (node in read and node.op == "get_attr"):
            values[node] = graph.node_copy(node, values.__getitem__)
    copied = set() if own is None else {node for node in joint.gradients if node is not None and node not in own}
    results = [_copy(graph, values[node]) if node in copied else values[node] for node in ends]
    graph.output(tuple(results))
    return KernelGraph(fx.GraphModule(joint.module, graph), tuple(inputs), tuple(node.name for node in ends))


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    # A copy is dense, also that of an expanded value, whose elements share memory.
    copy.meta = {**node.meta, "val": torch.empty_like(node.meta["val"])}
    return copy


def _zeros(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    zeros = graph.call_function(
        torch.ops.aten.zeros.default, (list(value.shape),), {"dtype": value.dtype, "device": value.device}
    )
    zeros.meta = dict(node.meta)
    return zeros
