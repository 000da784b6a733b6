"""Two checks: of each division, with `PIPEGRAPH_VERIFY=1`, and of a joint graph at sizes of 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pipegraph.debug import InvalidGraphError
from pipegraph.kernels.graphs.block_operation import GradientMask, KernelGraph
from pipegraph.kernels.graphs.division import BackwardGraphs, base_of
from pipegraph.kernels.graphs.joint_graph import JointGraph, constant_of
from pipegraph.torch_private.fake_tensors import fake_tensors


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
        ("B", backward.full, available),
    ):
        if graph is not None:
            _refuse(f"{kind} reads what is not there when it runs", set(graph.inputs) - readable)
            _refuse(f"{kind} returns gradients of parameters that share memory", of_parameters & _sharing_memory(graph))
    for kinds, outputs in (("I and W", [*from_i, *from_w]), ("B", backward.full.outputs)):
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


def runs_as_traced(joint: JointGraph, numbers: Sequence[int]) -> bool:
    """Return whether every operation, run on fake tensors, has the shape and strides that the graph says.

    With symbols, `squeeze` of a dimension leaves it there, and with a size of 1 it does not: then another graph is
    right.
    """
    values: dict[fx.Node, Any] = {}
    with fake_tensors():
        for node in joint.module.graph.nodes:
            expected = _at(node.meta.get("val"), joint, numbers)
            if node.op == "placeholder":
                values[node] = expected
            elif node.op == "get_attr":
                values[node] = constant_of(joint.module, node)
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                try:
                    values[node] = node.target(*args, **kwargs)
                except Exception:  # whatever the operation raises for a shape that it does not take
                    return False
                if not _matches(values[node], expected):
                    return False
    return True


def _at(value: Any, joint: JointGraph, numbers: Sequence[int]) -> Any:
    """A node's value for these sizes."""
    if isinstance(value, (tuple, list)):
        return [_at(part, joint, numbers) for part in value]
    if not isinstance(value, Tensor):
        (number,) = joint.sizes.at([value], numbers)
        return number
    shape, strides = joint.sizes.at(value.shape, numbers), joint.sizes.at(value.stride(), numbers)
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def _matches(value: Any, expected: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) == len(expected) and all(map(_matches, value, expected))
    if not isinstance(value, Tensor):
        return bool(value == expected)
    strides = zip(value.shape, value.stride(), expected.stride(), strict=True)
    return value.shape == expected.shape and all(size == 1 or actual == required for size, actual, required in strides)
