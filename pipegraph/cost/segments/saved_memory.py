"""What a piece of a model keeps for its backward, and who else may hold it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, fx

from pipegraph.cost.segments.subgraph import Subgraph
from pipegraph.graph.internals import pytree
from pipegraph.kernels.graphs.division import base_of, is_view
from pipegraph.kernels.graphs.joint_graph import JointGraph


@dataclass(frozen=True)
class SavedMemory:
    """The memory kept for the backward of one microbatch, without parameters and buffers.

    ``inputs``, ``outputs``, ``input_gradients`` and ``output_gradients`` are positions among the piece's own: other
    pieces may hold the same memory. ``bytes`` is the size of everything else.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bytes: int
    input_gradients: tuple[int, ...] = ()
    output_gradients: tuple[int, ...] = ()


def kept_memory(subgraph: Subgraph, joint: JointGraph, names: Iterable[str]) -> SavedMemory:
    """Return the memory of the values ``names``, by who else may hold it.

    A view counts as its base, and once: the base's memory is kept.
    """
    nodes = {node.name: node for node in joint.module.graph.nodes}
    states, received, made = len(subgraph.state), len(subgraph.inputs), len(subgraph.outputs)
    places: dict[fx.Node, tuple[str, int]] = {}
    # Of memory that is several of these at once, the first in this order counts.
    for index, node in enumerate(joint.primals):
        places[node] = ("inputs", index - states) if 0 <= index - states < received else ("apart", index)
    for what, found in (("outputs", joint.outputs[:made]), ("output_gradients", joint.tangents[:made])):
        for index, each in enumerate(found):
            if each is not None:
                places.setdefault(base_of(each), (what, index))
    for index, each in enumerate(joint.gradients[states : states + received]):
        if each is not None:
            places.setdefault(base_of(each), ("input_gradients", index))
    at: dict[str, list[int]] = {}
    other = 0
    for base in dict.fromkeys(base_of(nodes[name]) for name in names):
        if base in places:
            at.setdefault(places[base][0], []).append(places[base][1])
        else:
            other += memory_of(base.meta["val"])
    at.pop("apart", None)
    inputs, outputs, of_inputs, of_outputs = (
        tuple(at.get(what, ())) for what in ("inputs", "outputs", "input_gradients", "output_gradients")
    )
    return SavedMemory(inputs, outputs, other, of_inputs, of_outputs)


def unknown_memory(subgraph: Subgraph) -> SavedMemory:
    """Return what autograd keeps of a piece that could not be traced: at most every value with a gradient."""
    made = [node for node in subgraph.nodes if node.meta["requires_grad"] and not is_view(node)]
    values = (value for node in made for value in pytree.tree_leaves(node.meta["val"]))
    wanted = [index for index, wanted in enumerate(subgraph.input_gradients) if wanted]
    return SavedMemory(tuple(wanted), (), sum(memory_of(value) for value in values if isinstance(value, Tensor)))


def memory_of(value: Tensor) -> int:
    """Bytes from the first element of a tensor to its last: elements that overlap count once."""
    if value.numel() == 0:
        return 0
    span = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    return span * value.element_size()
