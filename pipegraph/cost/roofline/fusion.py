"""The kernels that Inductor makes of a graph of ATen operations.

Neighbours that loop over the same elements share a kernel, which reads each of its inputs once and writes each of its
results once. Views are free, and constants are computed where they are read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, fx

from pipegraph.cost.roofline.operator_roles import (
    FusionRole,
    given_to,
    reduces_last,
    role_of,
    source_of,
    target_of,
    tensors,
)
from pipegraph.graph.operators import Loop, operator_of

Reduction = tuple[int, bool]
"""How many elements are left, and whether the last dimension is among the reduced."""


@dataclass(eq=False)
class FusedKernel:
    """Operations that run as one kernel.

    Attributes:
        role: of all of them; loops that reduce and loops that do not are both ELEMENTWISE.
        nodes: in the graph's order.
        elements: how many its loops pass over.
        reduced: where they reduce.
        reads: each tensor that it reads → the views of it → bytes.
        writes: bytes of each result that another kernel reads, or that the graph returns.
        kept: those that the graph returns.
    """

    role: FusionRole
    nodes: list[fx.Node] = field(default_factory=list)
    elements: int = 0
    reduced: Reduction | None = None
    reads: dict[fx.Node, dict[fx.Node, int]] = field(default_factory=dict)
    writes: dict[fx.Node, int] = field(default_factory=dict)
    kept: set[fx.Node] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        """What it reads and writes."""
        read = sum(min(sum(views.values()), size_of(base)) for base, views in self.reads.items())
        return read + sum(self.writes.values())


def fused_kernels(graph: fx.Graph) -> list[FusedKernel]:
    """The kernels of a graph whose nodes have their values, without memory, in ``meta["val"]``."""
    fusion = _Fusion()
    for node in graph.nodes:
        if node.op == "call_function":
            fusion.add(node)
        elif node.op == "output":
            fusion.finish(node.all_input_nodes)
    return fusion.kernels


def size_of(node: fx.Node) -> int:
    """Bytes of its value, elements that a view repeats counted once."""
    return sum(_distinct(value) * value.element_size() for value in tensors(node))


def _distinct(tensor: Tensor) -> int:
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride else 1
    return count


class _Fusion:
    """Kernels as they grow, node by node. None reads what a later one makes, so that no two wait for each other."""

    def __init__(self) -> None:
        self.kernels: list[FusedKernel] = []
        self._number: dict[FusedKernel, int] = {}
        self._maker: dict[fx.Node, FusedKernel] = {}
        self._base: dict[fx.Node, fx.Node] = {}
        self._readers: dict[fx.Node, list[FusedKernel]] = {}
        self._constants: set[fx.Node] = set()

    def add(self, node: fx.Node) -> None:
        """The next node of the graph."""
        match role_of(node):
            case FusionRole.VIEW:
                self._alias(node)
            case FusionRole.CONSTANT:
                self._constants.add(node)
            case FusionRole.SCATTER:
                self._scatter(node)
            case FusionRole.KERNEL:
                self._materialise(node.all_input_nodes)
                self._join(node, self._new(FusionRole.KERNEL))
            case role:
                self._loop(node, role)

    def finish(self, returned: Iterable[fx.Node]) -> None:
        """Find out which results are written to memory."""
        self._materialise(returned)
        read = [base for kernel in self.kernels for base in kernel.reads]
        kept = [base for base in map(self._of, returned) if base in self._maker]
        for base in [*read, *kept]:
            if base in self._maker:
                self._maker[base].writes.setdefault(base, size_of(base))
        for base in kept:
            self._maker[base].kept.add(base)

    def _of(self, node: fx.Node) -> fx.Node:
        return self._base.get(node, node)

    def _alias(self, node: fx.Node) -> None:
        if not node.all_input_nodes:
            return
        base = self._of(node.all_input_nodes[0])
        if node.target is operator.getitem and base in self._maker:
            self._maker[node] = self._maker[base]  # one of several results, each with memory of its own
        else:
            self._base[node] = base

    def _loop(self, node: fx.Node, role: FusionRole) -> None:
        elements, reduced = max(value.numel() for value in tensors(node)), None
        if role is FusionRole.REDUCTION:
            elements, reduced = given_to(node).numel(), (tensors(node)[0].numel(), reduces_last(node))
        fitting = [kernel for kernel in self._near(node) if _fits(kernel, elements, reduced)]
        kernel = max(fitting, key=lambda kernel: self._shared(node, kernel), default=None)
        if kernel is None:
            kernel = self._new(FusionRole.ELEMENTWISE, elements)
        kernel.reduced = kernel.reduced or reduced
        self._join(node, kernel)

    def _scatter(self, node: fx.Node) -> None:
        """Make what is written into, a copy or zeros, and write into it: of each element the old and the new value."""
        target = target_of(node)
        made = self._new(FusionRole.ELEMENTWISE, tensors(node)[0].numel())
        made.writes[node] = size_of(node)
        if target is not None and self._of(target) not in self._constants:
            self._read(made, target, size_of(target))
        kernel = self._new(FusionRole.SCATTER)
        self._join(node, kernel, without=target)
        kernel.writes[node] = min(2 * size_of(source_of(node)), size_of(node))

    def _near(self, node: fx.Node) -> list[FusedKernel]:
        """Loops that make what it reads, or read that too, and that may still run when all it reads has been made."""
        bases = [self._of(each) for each in node.all_input_nodes]
        makers = [self._maker[base] for base in bases if base in self._maker]
        found = [*makers, *(kernel for base in bases for kernel in self._readers.get(base, ()))]
        last = max(map(self._number.__getitem__, makers), default=0)
        return [
            kernel
            for kernel in dict.fromkeys(found)
            if kernel.role is FusionRole.ELEMENTWISE and self._number[kernel] >= last
        ]

    def _shared(self, node: fx.Node, kernel: FusedKernel) -> int:
        """Bytes that need not be read again."""
        bases = {self._of(each) for each in node.all_input_nodes}
        return sum(size_of(base) for base in bases if self._maker.get(base) is kernel or base in kernel.reads)

    def _new(self, role: FusionRole, elements: int = 0) -> FusedKernel:
        kernel = FusedKernel(role, elements=elements)
        self._number[kernel] = len(self.kernels)
        self.kernels.append(kernel)
        return kernel

    def _join(self, node: fx.Node, kernel: FusedKernel, without: fx.Node | None = None) -> None:
        """Let the kernel run the node as well."""
        kernel.nodes.append(node)
        self._maker[node] = kernel
        gathers = operator_of(node).loop is Loop.GATHER
        for each in node.all_input_nodes:
            if each is not without:
                size = size_of(each)
                self._read(kernel, each, min(size, size_of(node)) if gathers and each is node.args[0] else size)

    def _read(self, kernel: FusedKernel, node: fx.Node, size: int) -> None:
        base = self._of(node)
        if base in self._constants or self._maker.get(base) is kernel:
            return
        views = kernel.reads.setdefault(base, {})
        views[node] = max(size, views.get(node, 0))
        self._readers.setdefault(base, []).append(kernel)

    def _materialise(self, read: Iterable[fx.Node]) -> None:
        """Write constants to memory that something other than a loop reads."""
        for base in map(self._of, read):
            if base in self._constants:
                self._constants.remove(base)
                self._join(base, self._new(FusionRole.ELEMENTWISE, tensors(base)[0].numel()))


def _fits(kernel: FusedKernel, elements: int, reduced: Reduction | None) -> bool:
    """Whether loops over so many elements, which leave so many, can be the kernel's."""
    if reduced is None:
        return elements == kernel.elements or (kernel.reduced is not None and elements == kernel.reduced[0])
    return elements == kernel.elements and kernel.reduced in (None, reduced)
