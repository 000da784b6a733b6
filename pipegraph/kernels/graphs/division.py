"""A joint graph divided into F, I, W and B: pure functions, by what each of their results depends on.

F  primals                                ─▶ outputs, new values of what was written to, saved values
I  saved values, tangents                 ─▶ gradients of inputs, values that W needs
W  saved values, tangents, values from I  ─▶ gradients of parameters
B  saved values, tangents                 ─▶ all gradients

All of them are given the sizes as well.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from pipegraph.errors import PipegraphError
from pipegraph.kernels.graphs.block_operation import OPERATION, GradientMask, KernelGraph, is_random
from pipegraph.kernels.graphs.joint_graph import JointGraph
from pipegraph.kernels.graphs.regions import Regions
from pipegraph.kernels.symbolic_sizes import are_equal, is_size, size_nodes
from pipegraph.recompute import OFFLOAD
from pipegraph.torch_private.operators import OpOverload, is_collective, is_view_operation
from pipegraph.torch_private.partitioner import min_cut

# ---- convolution gradients -------------------------------------------------------------------------------------------
# Gradients of convolutions: two calls, of which I has one and W the other, and one call where both are computed.


convolution_backward: Any = torch.ops.aten.convolution_backward.default

Gradients = Sequence[Tensor | None]
"""Of the input, the weight and the bias of a convolution."""


def separate_gradients(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Gradients:
    """Compute the gradient of a convolution's input, for I, apart from those of its weight and bias, for W.

    This costs nothing: libraries compute the two by separate kernels anyway. ``compute`` is what computes one of them.
    """
    *operands, (of_input, of_weight, of_bias) = args
    if not of_input or not (of_weight or of_bias):
        gradients: Gradients = compute(*args, **kwargs)
        return gradients
    first, _, _ = convolution_backward(*operands, (True, False, False))
    _, second, third = convolution_backward(*operands, (False, of_weight, of_bias))
    return first, second, third


def join_gradients(module: fx.GraphModule) -> None:
    """Let one call compute what several with the same arguments compute of the gradients of a convolution.

    A graph of both I and W reads the gradient of the output once then. If two calls read it, Inductor writes it twice:
    once as it is computed, and once in the order that convolutions want.
    """
    first: dict[Any, fx.Node] = {}
    for node in module.graph.find_nodes(op="call_function", target=convolution_backward):
        args: Any = node.args
        *arguments, mask = args
        first_call = first.setdefault(tuple(map(_hashable, arguments)), node)
        if first_call is not node:
            first_args: Any = first_call.args
            masks = zip(first_args[-1], mask, strict=True)
            values = zip(first_call.meta["val"], node.meta["val"], strict=True)
            first_call.args = (*arguments, [in_first or in_second for in_first, in_second in masks])
            first_call.meta["val"] = tuple(val if first_val is None else first_val for first_val, val in values)
            _move_results(node, first_call)
    module.recompile()


def _move_results(node: fx.Node, first_call: fx.Node) -> None:
    """Let what reads the results of a call read those of an earlier one."""
    for item in list(node.users):
        with node.graph.inserting_after(first_call):
            moved = node.graph.call_function(operator.getitem, (first_call, item.args[1]))
        moved.meta = item.meta
        item.replace_all_uses_with(moved)
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument


# ---- division --------------------------------------------------------------------------------------------------------


aten = torch.ops.aten

_VIEWS_WITHOUT_ALIAS = {aten._unsafe_view.default, aten._reshape_alias.default}
_EXPENSIVE = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "convolution_backward"}
_EXPENSIVE |= {"embedding_dense_backward", "_foreach", "call"}


@dataclass(frozen=True)
class BackwardGraphs:
    """The backward for one choice of outputs with a gradient.

    Attributes:
        input: I; None if no input has a gradient: W then does everything.
        weight: W; None if nothing is left for it.
        full: B.
        gradients: the name of each primal's gradient, or None.
    """

    input: KernelGraph | None
    weight: KernelGraph | None
    full: KernelGraph
    gradients: tuple[str | None, ...]

    @property
    def graphs(self) -> list[KernelGraph]:
        """The graphs that exist."""
        return [graph for graph in (self.input, self.weight, self.full) if graph is not None]


def saved_values(joint: JointGraph, regions: Regions) -> set[fx.Node]:
    """Return the values that F keeps for the backward, except primals.

    Random values and the results of blocks and collectives are always kept: the backward does not compute them again.
    Views are never kept, only the tensors that they view. Constants, such as the initial zeros of a gradient, are never
    kept. Apart from that, a region of "block" keeps its inputs and outputs only, and a region with a policy also the
    values that the policy saves. "offload" keeps the same values as "min-cut".

    Args:
        joint: the graph.
        regions: the regions of its operations. "block" counts as "min-cut" for a region that calls blocks.
    """
    forward = _forward_nodes(joint)
    scope = {node: regions.region_of(node) for node in forward}
    calling = {scope[node] for node in forward if node.target is OPERATION}
    choice = {
        region: "min-cut"
        if region.choice == OFFLOAD or (region.choice == "block" and region in calling)
        else region.choice
        for region in scope.values()
    }
    saved = {node for node in forward if is_random(node) or node.target is OPERATION or _is_collective_result(node)}
    saved |= {user for index in joint.written for user in joint.primals[index].users}  # the values from before
    saved |= {user for node in list(saved) for user in node.users if user.target is operator.getitem}
    saved |= {node for node in forward if choice[scope[node]] == "none" and node.all_input_nodes and not is_view(node)}
    for node in forward:
        for base in {base_of(source) for source in node.all_input_nodes} & scope.keys():
            ends = choice[scope[base]], choice[scope[node]]
            if scope[base] != scope[node] and base.all_input_nodes and ("block" in ends or any(map(callable, ends))):
                saved.add(base)
    if "min-cut" in choice.values():
        copy = fx.Graph()
        copy.output(copy.graph_copy(joint.module.graph, {}))
        names = min_cut(fx.GraphModule(joint.module, copy), len(joint.outputs) + len(joint.written))
        bases = {base_of(node) for node in forward if node.name in names and choice[scope[node]] == "min-cut"}
        saved |= {node for node in bases if node.op == "call_function"}
    chosen = (node for node in forward if callable(choice[scope[node]]))
    return saved | {base_of(node) for node in chosen if _is_saved_by(choice[scope[node]], node)} & scope.keys()


def _is_saved_by(policy: Any, node: fx.Node) -> bool:
    """Return whether a policy saves the result of an operation. It is given the operation's arguments without memory.

    As in `torch.utils.checkpoint`, True and False are short for saving and recomputing.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
    answer = policy(SelectiveCheckpointContext(is_recompute=False), node.target, *args, **kwargs)
    if isinstance(answer, bool):
        return answer
    name = answer.name if isinstance(answer, CheckpointPolicy) else repr(answer)
    if not name.endswith(("_SAVE", "_RECOMPUTE")):
        raise PipegraphError(
            f"the policy of recompute answers {name} for {node.target}: what F keeps stays on its device.",
            "CheckpointPolicy.MUST_SAVE, or MUST_RECOMPUTE.",
        )
    return name.endswith("_SAVE")


def forward_graph(joint: JointGraph, saved_nodes: Collection[fx.Node], backward: Iterable[KernelGraph]) -> KernelGraph:
    """Return F. Besides outputs, it returns those of the values `saved_nodes` that the graphs of the backward read."""
    nodes = {node.name: node for node in saved_nodes}
    saved = [nodes[name] for graph in backward for name in graph.inputs if name in nodes]
    return _extract(joint, (), [*joint.outputs, *joint.written.values(), *saved])


def backward_graphs(
    joint: JointGraph, saved: Collection[fx.Node], is_input: Sequence[bool], mask: GradientMask
) -> BackwardGraphs:
    """Return I, W and B.

    Args:
        joint: the graph.
        saved: values of the forward that need not be computed again.
        is_input: of each primal, whether its gradient belongs to I.
        mask: the outputs for which a gradient arrives.
    """
    tangents = [node for node, arrives in zip(joint.tangents, mask, strict=True) if node is not None and arrives]
    absent = [node for node, arrives in zip(joint.tangents, mask, strict=True) if node is not None and not arrives]
    reached = _reached(tangents)
    gradients = [node if node in reached else None for node in joint.gradients]
    inputs = [node for node, of_input in zip(gradients, is_input, strict=True) if of_input and node is not None]
    weights = [node for node, of_input in zip(gradients, is_input, strict=True) if not of_input and node is not None]
    available = {*saved, *tangents}
    uncopied = {*_without_none(gradients)} - _sharing_memory(gradients, weights)
    names = tuple(None if node is None else node.name for node in gradients)
    full = _extract(joint, available, _without_none(gradients), uncopied, absent)
    join_gradients(full.module)
    if not inputs:
        return BackwardGraphs(None, full if weights else None, full, names)
    in_i = _ancestors(inputs, available)
    # A gradient that costs little beyond I (of a norm's weight) is computed there, where its factors are.
    cheap = [node for node in weights if not any(map(_is_expensive, _ancestors([node], available) - in_i))]
    in_i = _ancestors([*inputs, *cheap], available)
    deferred = [node for node in weights if node not in cheap]
    passed = _frontier(deferred, in_i, available)
    uncopied -= {node for node in weights if base_of(node) in passed}
    return BackwardGraphs(
        _extract(joint, available, [*inputs, *cheap, *passed], uncopied, absent),
        _extract(joint, available | set(passed), deferred, uncopied, absent) if deferred else None,
        full,
        names,
    )


def is_view(node: fx.Node) -> bool:
    """Return whether a node's result shares the memory of its first argument, also as one of several such results."""
    target = node.target
    if target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    return target in _VIEWS_WITHOUT_ALIAS or is_view_operation(target)


def base_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory a node's result shares: the node itself if it is not a view."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _without_none(nodes: Iterable[fx.Node | None]) -> list[fx.Node]:
    return [node for node in nodes if node is not None]


def _forward_nodes(joint: JointGraph) -> set[fx.Node]:
    """The operations that depend on no tangent, without those that compute sizes."""
    backward = {*_reached(_without_none(joint.tangents)), *filter(is_size, joint.module.graph.nodes)}
    return {node for node in joint.module.graph.nodes if node not in backward and node.op == "call_function"}


def _reached(starts: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that depend on one of `starts`, and these themselves."""
    reached: set[fx.Node] = set()
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += node.users
    return reached


def _ancestors(ends: Iterable[fx.Node], available: Collection[fx.Node]) -> set[fx.Node]:
    """The operations that compute `ends` from what is available."""
    ancestors: set[fx.Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and node not in ancestors and node not in available:
            ancestors.add(node)
            waiting += node.all_input_nodes
    return ancestors


def _frontier(ends: Iterable[fx.Node], in_i: set[fx.Node], available: Collection[fx.Node]) -> list[fx.Node]:
    """The values of I that `ends` are computed from. Instead of a view what it views, from which W makes it again."""
    frontier: dict[fx.Node, None] = {}
    visited: set[fx.Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node in visited or node in available or node.op != "call_function" or is_size(node):
            continue
        visited.add(node)
        is_item = node.target is operator.getitem and node.args[0] in in_i
        if (node in in_i or is_item) and not is_view(node):
            frontier[node] = None
        else:
            waiting += node.all_input_nodes
    return list(frontier)


def _sharing_memory(gradients: Sequence[fx.Node | None], weights: Collection[fx.Node]) -> set[fx.Node]:
    """The gradients of parameters that may not become `.grad`: another gradient has the same memory, or a primal or
    tangent does, or only a part of the memory is the gradient."""
    users = Counter(map(base_of, _without_none(gradients)))
    sharing = set()
    for node in weights:
        base = base_of(node)
        value, base_value = node.meta.get("val"), base.meta.get("val")
        same_size = value is not None and base_value is not None and are_equal([value.numel()], [base_value.numel()])
        if base.op != "call_function" or users[base] > 1 or not same_size:
            sharing.add(node)
    return sharing


def _is_collective_result(node: fx.Node) -> bool:
    return is_collective(node) and node.target is torch.ops._c10d_functional.wait_tensor.default


def _is_expensive(node: fx.Node) -> bool:
    target = node.target
    if is_collective(node):  # I does not wait for what only a weight's gradient needs
        return True
    return isinstance(target, OpOverload) and target.overloadpacket.__name__ in _EXPENSIVE


def _extract(
    joint: JointGraph,
    available: Collection[fx.Node],
    outputs: Iterable[fx.Node],
    uncopied: Collection[fx.Node] | None = None,
    absent: Collection[fx.Node] = (),
) -> KernelGraph:
    """The graph that computes `outputs` from placeholders and from what is available.

    A gradient that is not `uncopied` is returned as a copy. A placeholder that is `absent` is zeros.
    """
    ends = list(dict.fromkeys(outputs))
    computed = _ancestors(ends, available)
    read = {node for reader in computed for node in reader.all_input_nodes} - computed | (set(ends) - computed)
    nodes = list(joint.module.graph.nodes)
    sizes = nodes[: len(joint.sizes)]
    inputs = [node for node in nodes if node in read - set(sizes) and node.op != "get_attr" and node not in absent]
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in (*sizes, *inputs):
        values[node] = graph.placeholder(node.name)
        values[node].meta = node.meta
    for node in nodes:
        if node in absent and node in read:
            shape = size_nodes(graph, node.meta["val"].shape, joint.sizes, [values[size] for size in sizes])
            values[node] = _zeros(graph, node, shape)
        elif node in computed or (node in read and node.op == "get_attr"):
            values[node] = graph.node_copy(node, values.__getitem__)
    copied = set() if uncopied is None else set(_without_none(joint.gradients)) - set(uncopied)
    graph.output(tuple(_copy(graph, values[node]) if node in copied else values[node] for node in ends))
    read_names, returned_names = (tuple(node.name for node in group) for group in (inputs, ends))
    return KernelGraph(fx.GraphModule(joint.module, graph), read_names, returned_names, joint.sizes)


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    copy = graph.call_function(aten.clone.default, (node,))
    # A copy is dense, also that of an expanded value, whose elements share memory.
    copy.meta = {**node.meta, "val": torch.empty_like(node.meta["val"])}
    return copy


def _zeros(graph: fx.Graph, node: fx.Node, shape: list[Any]) -> fx.Node:
    value = node.meta["val"]
    zeros = graph.call_function(aten.zeros.default, (shape,), {"dtype": value.dtype, "device": value.device})
    zeros.meta = dict(node.meta)
    return zeros
