"""The kernels that a device runs for a graph of ATen operators: Inductor's, and attention as a GPU computes it.

In Inductor, neighbouring operators that loop over the same elements share a kernel, which reads each of its inputs
once and writes each of its results once. Views are free. The kernels that read a constant compute it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from pipegraph.cost.roofline.operator_work import (
    FusionRole,
    first_argument,
    reduces_last,
    result_tensors,
    role_of,
    scatter_source,
    scatter_target,
)
from pipegraph.graph.operators import Loop, operator_of

Reduction = tuple[int, bool]
"""How many elements are left, and whether the last dimension is among the reduced."""

aten = torch.ops.aten

_FLASH_HEAD = 256  # the largest head that flash attention takes


@dataclass(eq=False)
class FusedKernel:
    """Operators that run as one kernel.

    Attributes:
        role: of all of them; loops that reduce and loops that do not are both ELEMENTWISE.
        nodes: in the graph's order.
        elements: how many its loops pass over.
        reduced: what its reductions leave; None without any.
        reads: tensor that it reads → the views of it → bytes.
        writes: bytes of each result that another kernel reads, or that the graph returns.
        returned: the results that the graph returns.
    """

    role: FusionRole
    nodes: list[fx.Node] = field(default_factory=list)
    elements: int = 0
    reduced: Reduction | None = None
    reads: dict[fx.Node, dict[fx.Node, int]] = field(default_factory=dict)
    writes: dict[fx.Node, int] = field(default_factory=dict)
    returned: set[fx.Node] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        """Bytes that it reads and writes."""
        read = sum(min(sum(views.values()), value_size(base)) for base, views in self.reads.items())
        return read + sum(self.writes.values())

    def fits(self, elements: int, reduced: Reduction | None) -> bool:
        """Return whether it can run loops over ``elements`` elements, reduced to ``reduced`` unless that is None."""
        if reduced is None:
            return elements == self.elements or (self.reduced is not None and elements == self.reduced[0])
        return elements == self.elements and self.reduced in (None, reduced)


def fused_kernels(graph: fx.Graph, in_order: bool = False) -> list[FusedKernel]:
    """Return the kernels of a graph whose nodes have their values, without memory, in ``meta["val"]``.

    Args:
        in_order: whether each kernel runs where its first operation stands, as when memory is counted of what may also
            run uncompiled; else a loop may run later, together with what reads it.
    """
    fusion = _Fusion(in_order)
    for node in graph.nodes:
        if node.op == "call_function":
            fusion.add(node)
        elif node.op == "output":
            fusion.finish(node.all_input_nodes)
    return fusion.kernels


def value_size(node: fx.Node) -> int:
    """Return the bytes of a node's value. Elements that a view repeats count once."""
    return sum(_distinct_elements(value) * value.element_size() for value in result_tensors(node))


def _distinct_elements(tensor: Tensor) -> int:
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride else 1
    return count


class _Fusion:
    """Kernels as they grow, node by node. None reads what a later one makes, so that no two wait for each other."""

    def __init__(self, in_order: bool) -> None:
        self.kernels: list[FusedKernel] = []
        self._in_order = in_order
        self._numbers = itertools.count()
        self._number: dict[FusedKernel, int] = {}
        self._awaited: set[FusedKernel] = set()
        self._maker: dict[fx.Node, FusedKernel] = {}
        self._base: dict[fx.Node, fx.Node] = {}
        self._readers: dict[fx.Node, list[FusedKernel]] = {}
        self._constants: set[fx.Node] = set()

    def add(self, node: fx.Node) -> None:
        """Add the next node of the graph."""
        match role_of(node):
            case FusionRole.VIEW:
                self._add_view(node)
            case FusionRole.CONSTANT:
                self._constants.add(node)
            case FusionRole.SCATTER:
                self._add_scatter(node)
            case FusionRole.KERNEL:
                self._materialise(node.all_input_nodes)
                self._join(node, self._new(FusionRole.KERNEL))
            case role:
                self._add_loop(node, role)

    def finish(self, returned: Iterable[fx.Node]) -> None:
        """Find out which results are written to memory."""
        self._materialise(returned)
        read = [base for kernel in self.kernels for base in kernel.reads]
        returned_bases = [base for base in map(self._base_of, returned) if base in self._maker]
        for base in [*read, *returned_bases]:
            if base in self._maker:
                self._maker[base].writes.setdefault(base, value_size(base))
        for base in returned_bases:
            self._maker[base].returned.add(base)

    def _base_of(self, node: fx.Node) -> fx.Node:
        return self._base.get(node, node)

    def _add_view(self, node: fx.Node) -> None:
        if not node.all_input_nodes:
            return
        base = self._base_of(node.all_input_nodes[0])
        if node.target is operator.getitem and base in self._maker:
            self._maker[node] = self._maker[base]  # one of several results, each in its own memory
        else:
            self._base[node] = base

    def _add_loop(self, node: fx.Node, role: FusionRole) -> None:
        elements, reduced = max(value.numel() for value in result_tensors(node)), None
        if role is FusionRole.REDUCTION:
            elements, reduced = first_argument(node).numel(), (result_tensors(node)[0].numel(), reduces_last(node))
        makers = self._makers(node)
        last = max(map(self._number.__getitem__, makers), default=0)
        fitting = [kernel for kernel in self._candidates(node, makers, last) if kernel.fits(elements, reduced)]
        kernel = max(fitting, key=lambda kernel: self._shared_bytes(node, kernel), default=None)
        if kernel is None:
            kernel = self._new(FusionRole.ELEMENTWISE, elements)
        elif self._number[kernel] < last:
            self.kernels.remove(kernel)
            self._append(kernel)
        kernel.reduced = kernel.reduced or reduced
        self._join(node, kernel)

    def _add_scatter(self, node: fx.Node) -> None:
        """Make what is written into, a copy or zeros; then read the old value of each written element and write it."""
        target = scatter_target(node)
        target_kernel = self._new(FusionRole.ELEMENTWISE, result_tensors(node)[0].numel())
        target_kernel.writes[node] = value_size(node)
        if target is not None and self._base_of(target) not in self._constants:
            self._read(target_kernel, target, value_size(target))
        kernel = self._new(FusionRole.SCATTER)
        self._join(node, kernel, without=target)
        kernel.writes[node] = min(2 * value_size(scatter_source(node)), value_size(node))

    def _makers(self, node: fx.Node) -> list[FusedKernel]:
        """The kernels that make what a node reads."""
        bases = map(self._base_of, node.all_input_nodes)
        return list(dict.fromkeys(self._maker[base] for base in bases if base in self._maker))

    def _candidates(self, node: fx.Node, makers: Sequence[FusedKernel], last: int) -> list[FusedKernel]:
        """Loops that compute or read an input of the node, and that can run when all its inputs are computed.

        A loop with results that no kernel has read yet can run later than its position, after the `last` of the
        `makers`.
        """
        readers = (kernel for arg in node.all_input_nodes for kernel in self._readers.get(self._base_of(arg), ()))
        return [
            kernel
            for kernel in dict.fromkeys([*makers, *readers])
            if kernel.role is FusionRole.ELEMENTWISE
            and (self._number[kernel] >= last or (kernel in makers and self._may_run_later(kernel)))
        ]

    def _may_run_later(self, kernel: FusedKernel) -> bool:
        return not self._in_order and kernel not in self._awaited

    def _shared_bytes(self, node: fx.Node, kernel: FusedKernel) -> int:
        """Bytes that need not be read again."""
        bases = {self._base_of(arg) for arg in node.all_input_nodes}
        return sum(value_size(base) for base in bases if self._maker.get(base) is kernel or base in kernel.reads)

    def _new(self, role: FusionRole, elements: int = 0) -> FusedKernel:
        kernel = FusedKernel(role, elements=elements)
        self._append(kernel)
        return kernel

    def _append(self, kernel: FusedKernel) -> None:
        """Let a kernel run after all others that there are by now."""
        self._number[kernel] = next(self._numbers)
        self.kernels.append(kernel)

    def _join(self, node: fx.Node, kernel: FusedKernel, without: fx.Node | None = None) -> None:
        """Let the kernel run the node as well."""
        kernel.nodes.append(node)
        self._maker[node] = kernel
        gathers = operator_of(node).loop is Loop.GATHER
        for arg in node.all_input_nodes:
            if arg is not without:
                # A gather reads no more of its first argument than it returns.
                size = value_size(arg)
                self._read(kernel, arg, min(size, value_size(node)) if gathers and arg is node.args[0] else size)

    def _read(self, kernel: FusedKernel, node: fx.Node, size: int) -> None:
        base = self._base_of(node)
        if base in self._constants or self._maker.get(base) is kernel:
            return
        if base in self._maker:
            self._awaited.add(self._maker[base])
        views = kernel.reads.setdefault(base, {})
        views[node] = max(size, views.get(node, 0))
        self._readers.setdefault(base, []).append(kernel)

    def _materialise(self, read: Iterable[fx.Node]) -> None:
        """Write constants to memory that something other than a loop reads."""
        for base in map(self._base_of, read):
            if base in self._constants:
                self._constants.remove(base)
                self._join(base, self._new(FusionRole.ELEMENTWISE, result_tensors(base)[0].numel()))


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` by the kernel that torch chooses for these arguments on a GPU.

    On fake tensors torch chooses as for the CPU: products and a softmax that write all the scores out where,
    say, the heads of keys and values differ in size. Query [batch, heads, length, size], in any dtype.
    """
    if query.dim() != 4:
        return aten.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None and query.shape[-1] == value.shape[-1] <= _FLASH_HEAD:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
