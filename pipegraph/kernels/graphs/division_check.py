"""A check of each division, with `PIPEGRAPH_VERIFY=1`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from pipegraph.kernels.graphs.block_operation import GradientMask, KernelGraph
from pipegraph.kernels.graphs.division import BackwardGraphs, base_of
from pipegraph.kernels.graphs.joint_graph import JointGraph
from pipegraph.verification import InvalidGraphError


def check_division(
    joint: JointGraph, forward: KernelGraph, backward: BackwardGraphs, is_input: Sequence[bool], mask: GradientMask
) -> None:
    """Check F against I, W and B for the outputs in `mask`.

    Raises:
        InvalidGraphError: I, W or B reads a value that is not there when it runs; a gradient is computed by none of
            I and W, or by both; F saves a value that nothing reads; or the gradient of a parameter, which becomes its
            `.grad`, shares memory with another value.
    """
    tangents = [node.name for node, arrives in zip(joint.tangents, mask, strict=True) if node is not None and arrives]
    available = {*forward.outputs, *(node.name for node in joint.primals), *tangents}
    from_i = () if backward.input is None else backward.input.outputs
    from_w = () if backward.weight is None else backward.weight.outputs
    gradients = {name for name in backward.gradients if name is not None}
    of_parameters = {name for name, of_input in zip(backward.gradients, is_input, strict=True) if name and not of_input}
    for kind, graph, readable in (
        ("I", backward.input, available),
        ("W", backward.weight, {*available, *from_i}),
        ("B", backward.whole, available),
    ):
        if graph is not None:
            _refuse(f"{kind} reads what is not there when it runs", set(graph.inputs) - readable)
            _refuse(f"{kind} returns gradients of parameters that share memory", of_parameters & _sharing_memory(graph))
    for kinds, outputs in (("I and W", [*from_i, *from_w]), ("B", backward.whole.outputs)):
        counts = Counter(outputs)
        _refuse(
            f"{kinds}: gradients that are not returned exactly once", {name for name in gradients if counts[name] != 1}
        )
    if mask == tuple(node is not None for node in joint.tangents):
        returned = {node.name for node in (*joint.outputs, *joint.written.values())}
        read = {name for graph in backward.graphs for name in graph.inputs}
        _refuse("F saves what nothing reads", set(forward.outputs) - returned - read)


def _sharing_memory(graph: KernelGraph) -> set[str]:
    """The outputs whose memory another output, or an input, has too."""
    (end,) = graph.module.graph.find_nodes(op="output")
    bases = dict(zip(graph.outputs, map(base_of, end.args[0]), strict=True))
    users = Counter(bases.values())
    return {name for name, base in bases.items() if users[base] > 1 or base.op != "call_function"}


def _refuse(rule: str, names: Collection[str]) -> None:
    if names:
        raise InvalidGraphError(f"{rule}: {', '.join(sorted(names))}")
