"""What a piece of a model keeps for its backward, and who else may hold it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, fx

from pipegraph.cost.segments.subgraph import Subgraph
from pipegraph.kernels.graphs.division import base_of, is_view
from pipegraph.kernels.graphs.joint_graph import JointGraph
from pipegraph.kernels.graphs.regions import place_of
from pipegraph.torch_private.pytrees import pytree


@dataclass(frozen=True)
class SavedMemory:
    """The memory kept for the backward of one microbatch, without parameters and buffers.

    ``inputs``, ``outputs``, ``input_gradients`` and ``output_gradients`` are positions among the piece's own: other
    pieces may hold the same memory. ``apart`` is the size of all other memory, in bytes, by the position in
    ``Subgraph.nodes`` of the operation that allocates it, in its forward or backward; None for the loss.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    apart: Mapping[int | None, int] = field(default_factory=dict)
    input_gradients: tuple[int, ...] = ()
    output_gradients: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """The size of what no other piece holds."""
        return sum(self.apart.values())

    def at_positions(self, positions: Collection[int]) -> SavedMemory:
        """Return the same with those alone of ``apart`` whose position is one of these."""
        return replace(self, apart={position: size for position, size in self.apart.items() if position in positions})


def kept_memory(subgraph: Subgraph, joint: JointGraph, names: Iterable[str]) -> SavedMemory:
    """Return the memory of the values ``names``, by who else may hold it.

    A view counts as its base, and once: the base's memory is kept.
    """
    nodes = {node.name: node for node in joint.module.graph.nodes}
    states, received, output_count = len(subgraph.state), len(subgraph.inputs), len(subgraph.outputs)
    places: dict[fx.Node, tuple[str, int]] = {}
    # Of memory that is several of these at once, the first in this order counts.
    for index, node in enumerate(joint.primals):
        places[node] = ("inputs", index - states) if 0 <= index - states < received else ("apart", index)
    for role, joint_nodes in (
        ("outputs", joint.outputs[:output_count]),
        ("output_gradients", joint.tangents[:output_count]),
    ):
        for index, joint_node in enumerate(joint_nodes):
            if joint_node is not None:
                places.setdefault(base_of(joint_node), (role, index))
    for index, gradient in enumerate(joint.gradients[states : states + received]):
        if gradient is not None:
            places.setdefault(base_of(gradient), ("input_gradients", index))
    at: dict[str, list[int]] = {}
    apart: Counter[int | None] = Counter()
    for base in dict.fromkeys(base_of(nodes[name]) for name in names):
        if base in places:
            at.setdefault(places[base][0], []).append(places[base][1])
        else:
            apart[place_of(base)] += memory_of(base.meta["val"])
    at.pop("apart", None)
    inputs, outputs, of_inputs, of_outputs = (
        tuple(at.get(kind, ())) for kind in ("inputs", "outputs", "input_gradients", "output_gradients")
    )
    return SavedMemory(inputs, outputs, apart, of_inputs, of_outputs)


def unknown_memory(subgraph: Subgraph) -> SavedMemory:
    """Return what autograd keeps of a piece that could not be traced: at most every value with a gradient."""
    apart: Counter[int | None] = Counter()
    for position, node in enumerate(subgraph.nodes):
        if node.meta["requires_grad"] and not is_view(node):
            values = (value for value in pytree.tree_leaves(node.meta["val"]) if isinstance(value, Tensor))
            apart[position] += sum(map(memory_of, values))
    differentiable_inputs = [index for index, needs_gradient in enumerate(subgraph.input_gradients) if needs_gradient]
    return SavedMemory(tuple(differentiable_inputs), apart=apart)


def memory_of(value: Tensor) -> int:
    """Bytes from the first element of a tensor to its last: elements that overlap count once."""
    if value.numel() == 0:
        return 0
    span = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    return span * value.element_size()
