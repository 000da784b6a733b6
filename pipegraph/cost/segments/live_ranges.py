"""What the graphs of a block hold in memory while they run, by the live ranges of their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from pipegraph.cost.roofline.fused_kernels import FusedKernel, fused_kernels, value_size
from pipegraph.cost.roofline.operator_work import FusionRole
from pipegraph.cost.segments.subgraph import Subgraph
from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.kernels.gradient_products import products_of
from pipegraph.kernels.graphs.block_operation import KernelGraph
from pipegraph.kernels.graphs.division import base_of
from pipegraph.schedule import Kind


def peak_bytes(kernel_graph: KernelGraph, dropped: Collection[str] = (), gradients: Collection[str] = ()) -> int:
    """Return the most that a graph holds while it runs, beyond what is there before, kernel by kernel.

    A value that neighbours in one kernel hand on is never in memory. Any other is there from the kernel that makes it
    to the last one that reads it, or to the end if the graph returns it. Products that are gradients run last, and are
    added to what is there. The more counts of two ways to run a kernel: compiled, it has all of its results beside
    what it reads, or writes them over that; not compiled, its operations run one after the other.

    Args:
        kernel_graph: its nodes have their values, without memory, in ``meta["val"]``.
        dropped: inputs whose memory is free after the last kernel that reads them.
        gradients: the results that are gradients of weights.
    """
    graph = kernel_graph.module.graph
    products = {node for product in products_of(kernel_graph, gradients).values() for node in product.nodes}
    kernels = sorted(fused_kernels(graph, in_order=True), key=lambda kernel: not products.isdisjoint(kernel.nodes))
    (end,) = graph.find_nodes(op="output")
    returned = set(map(base_of, end.all_input_nodes)).union(*(kernel.returned for kernel in kernels))
    last: dict[fx.Node, tuple[int, fx.Node]] = {}
    for index, kernel in enumerate(kernels):
        last |= {node: (index, node) for node in kernel.writes}
        read = ((base_of(source), node) for node in kernel.nodes for source in node.all_input_nodes)
        last |= {base: (index, node) for base, node in read if base in kernel.reads or base in kernel.writes}
    freed: dict[int, dict[fx.Node, list[fx.Node]]] = {}
    for node, (index, reader) in last.items():
        if node not in returned and (node.op == "call_function" or node.name in dropped):
            freed.setdefault(index, {}).setdefault(reader, []).append(node)
    allocated = set(products)
    live_bytes = peak = 0
    for index, kernel in enumerate(kernels):
        new = {node: value_size(node) for node in kernel.writes if node not in allocated}
        allocated.update(new)
        by_reader = freed.get(index, {})
        total_bytes = live_bytes + sum(new.values())
        peak = max(peak, total_bytes - _written_over(kernel, new, by_reader))
        for node in kernel.nodes:
            live_bytes += new.get(node, 0)
            peak = max(peak, live_bytes)
            live_bytes -= sum(map(value_size, by_reader.get(node, ())))
        live_bytes = total_bytes - sum(value_size(node) for nodes in by_reader.values() for node in nodes)
    return peak


def _written_over(kernel: FusedKernel, new: Mapping[fx.Node, int], freed: Mapping[fx.Node, Sequence[fx.Node]]) -> int:
    """Return the bytes of results that loops write over values of as many bytes that were made before, and that no
    later kernel reads."""
    if kernel.role is not FusionRole.ELEMENTWISE:
        return 0
    sizes = Counter(value_size(node) for nodes in freed.values() for node in nodes if node.op == "call_function")
    return sum((Counter(new.values()) & sizes).elements())


class BlockPeaks(NamedTuple):
    """What F, I, W and B of a block hold at the most, beyond what is there before: bytes.

    What F saved, and what I hands to W, is free after its last reader. So is a gradient that came, in ``input_grad``
    and ``backward``; in those ``held`` its holder keeps it.
    """

    forward: int
    input_grad: int
    weight_grad: int
    backward: int
    input_grad_held: int
    backward_held: int

    def peak_of(self, kind: Kind, holds_gradients: bool) -> int:
        """Return the figure of a kind; ``holds_gradients`` says whether someone keeps the gradients that came."""
        if kind is Kind.F or kind is Kind.W:
            return self.forward if kind is Kind.F else self.weight_grad
        peak, free = (self.input_grad_held, self.input_grad) if kind is Kind.I else (self.backward_held, self.backward)
        return peak if holds_gradients else free


def block_peaks(subgraph: Subgraph, derivative: DividedFunction | None) -> BlockPeaks:
    """Return the peaks of a block. If it has no graphs, autograd is taken to hold the largest value twice more."""
    if derivative is None:
        values = [value for node in subgraph.nodes if isinstance(value := node.meta["val"], torch.Tensor)]
        largest = 2 * max((value.nbytes for value in values), default=0)
        return BlockPeaks(sum(value.nbytes for value in values), *[largest] * 5)
    joint, backward = derivative.joint, derivative.backward(derivative.full_mask)
    state = {node.name for node in joint.primals[: len(subgraph.state)]}
    gradients = {node.name for node in joint.tangents if node is not None}
    added = derivative.weight_gradients(derivative.full_mask)
    read_by_w = set() if backward.weight is None or backward.input is None else {*backward.weight.inputs}
    of_inputs = [0, 0]
    if backward.input is not None:
        dropped = {*backward.input.inputs} - state - read_by_w
        of_inputs = [peak_bytes(backward.input, names) for names in (dropped, dropped - gradients)]
    of_weights = 0
    if backward.weight is not None:
        of_weights = peak_bytes(backward.weight, {*backward.weight.inputs} - state, added)
    dropped = {*backward.full.inputs} - state
    full = [peak_bytes(backward.full, names, added) for names in (dropped, dropped - gradients)]
    return BlockPeaks(peak_bytes(derivative.forward), of_inputs[0], of_weights, full[0], of_inputs[1], full[1])
