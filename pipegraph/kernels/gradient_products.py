"""Gradients of weights that are products of two matrices: they are added to `.grad` while they are computed.

A compiled graph would write such a gradient to new memory, from which it is read again to be added. BLAS adds to what
is there: C ← A·B + C.

dy ─▶ views ─▶ A ─┐
x  ─▶ views ─▶ B ─┴─▶ A·B, or C ← A·B + C ─▶ transposed as often as the graph does
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, fx

from pipegraph.kernels.graphs.block_operation import KernelGraph
from pipegraph.kernels.graphs.division import is_view
from pipegraph.kernels.symbolic_sizes import Numbers
from pipegraph.torch_private.tracing import boxed

aten = torch.ops.aten

Sums = Mapping[int, Tensor]
"""position of an output → the tensor that it may be added to; then that tensor is the output"""

NO_SUMS: Final[Sums] = MappingProxyType({})


@dataclass(frozen=True)
class FoundProduct:
    """A product in a graph.

    Attributes:
        gradient: the last of its nodes.
        nodes: the product, and the transpositions after it.
        is_transposed: whether the gradient is the product's transpose.
        operands: the two matrices.
        views: those through which they are read, each after what it views.
    """

    gradient: fx.Node
    nodes: tuple[fx.Node, ...]
    is_transposed: bool
    operands: tuple[fx.Node, fx.Node]
    views: tuple[fx.Node, ...]


def products_of(kernel_graph: KernelGraph, gradients: Collection[str]) -> dict[str, FoundProduct]:
    """Return the products of a graph without blocks, by the names of the gradients."""
    graph = kernel_graph.module.graph
    (end,) = graph.find_nodes(op="output")
    names = {node: name for node, name in zip(end.args[0], kernel_graph.outputs, strict=True) if name in gradients}
    products = find_products(names, [node for node in graph.nodes if node.op == "call_function"])
    return {names[product.gradient]: product for product in products}


def find_products(gradients: Collection[fx.Node], nodes: Sequence[fx.Node]) -> list[FoundProduct]:
    """Return of some nodes of a graph the products that are gradients and that no other node reads."""
    among = set(nodes)
    candidates = (_find_product(node, among) for node in nodes if node in gradients)
    return [product for product in candidates if product is not None]


def apart_from_graph(
    products: Sequence[FoundProduct], nodes: Sequence[fx.Node], outputs: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the nodes that are left out of a graph without these products: theirs, and the views for them alone."""
    apart = {node for product in products for node in product.nodes}
    views = {view for product in products for view in product.views}
    for node in reversed(nodes):
        if node in views and node not in outputs and all(user in apart for user in node.users):
            apart.add(node)
    return apart


def _find_product(gradient: fx.Node, among: Collection[fx.Node]) -> FoundProduct | None:
    node, transpositions = gradient, []
    while _is_transposition(node):
        transpositions.append(node)
        node = node.all_input_nodes[0]
    chain = (*transpositions, node)
    if node.target is not aten.mm.default or any(member not in among or len(member.users) > 1 for member in chain):
        return None
    operands: Any = node.args
    views: dict[fx.Node, None] = {}
    for operand in operands:
        operand_views = []
        while operand in among and is_view(operand):
            operand_views.append(operand)
            operand = operand.all_input_nodes[0]
        views |= dict.fromkeys(reversed(operand_views))
    return FoundProduct(gradient, chain, len(transpositions) % 2 == 1, operands, tuple(views))


class GradientProduct:
    """A product that runs.

    Args:
        operands: the graph of the views before it. Its placeholders are the sizes, then the tensors.
        is_transposed: whether the gradient is the product's transpose.
    """

    def __init__(self, operands: fx.GraphModule, is_transposed: bool) -> None:
        self._operands = boxed(operands)
        self._is_transposed = is_transposed

    def __call__(self, numbers: Numbers, inputs: list[Tensor], sums: Sums) -> Sequence[Tensor]:
        """Run, with these sizes. Empties `inputs`."""
        inputs[:0] = numbers  # type: ignore[assignment]
        first, second = self._operands(inputs)
        into = sums.get(0)
        if into is None or (into.dtype, into.device, into.layout) != (first.dtype, first.device, first.layout):
            return [self._turned(torch.mm(first, second))]
        self._turned(into).addmm_(first, second)
        return [into]

    def _turned(self, matrix: Tensor) -> Tensor:
        return matrix.t() if self._is_transposed else matrix


def _is_transposition(node: fx.Node) -> bool:
    """Return whether a node exchanges the rows and the columns of a matrix."""
    arguments: Any = node.args
    if node.target is aten.permute.default:
        return [axis % 2 for axis in arguments[1]] == [1, 0]
    if node.target is aten.transpose.int:
        return node.meta["val"].dim() == 2 and bool((arguments[1] - arguments[2]) % 2)
    return node.target is aten.t.default
