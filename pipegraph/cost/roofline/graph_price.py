"""The seconds of a graph of ATen operations: a roofline of floating-point operations and bytes, kernel by kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pipegraph.cost.hardware import OTHER_OPERATIONS, Hardware
from pipegraph.cost.roofline.fused_kernels import FusedKernel, fused_kernels
from pipegraph.cost.roofline.operator_work import (
    FusionRole,
    is_uncounted,
    kernel_work,
    loop_elements,
    name_of,
    rate_name,
    result_tensors,
)
from pipegraph.kernels.graphs.block_operation import OPERATION, call_of, called_graph
from pipegraph.torch_private.fake_tensors import fake_tensors
from pipegraph.torch_private.inductor import inductor_decompositions
from pipegraph.torch_private.tracing import trace


def trace_aten(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function of tensors into the graph of ATen operations that Inductor is given.

    Args:
        function: returns one tensor or a tuple of them.
        inputs: tensors of the shapes, dtypes and devices to trace for; their values are not read.
    """

    def outputs(*tensors: Tensor) -> list[Tensor]:
        returned = function(*tensors)
        return list(returned) if isinstance(returned, tuple) else [returned]

    with fake_tensors(), torch.no_grad():
        arguments = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in inputs]
        module = trace(outputs, arguments, inductor_decompositions())
    module.graph.eliminate_dead_code()
    return module


@dataclass(frozen=True)
class GraphPrice:
    """What one run of a graph costs.

    Attributes:
        seconds: on the hardware.
        flops: floating-point operations, by torch's formulas: elementwise work counts as zero.
        bytes: read and written by its kernels.
        uncounted: operators that may compute a lot and have no formula: only their bytes are in ``seconds``.
    """

    seconds: float = 0.0
    flops: int = 0
    bytes: int = 0
    uncounted: tuple[str, ...] = ()

    def __add__(self, other: GraphPrice) -> GraphPrice:
        return GraphPrice(
            self.seconds + other.seconds,
            self.flops + other.flops,
            self.bytes + other.bytes,
            tuple(sorted({*self.uncounted, *other.uncounted})),
        )


def price_graph(
    module: fx.GraphModule, hardware: Hardware, footprint: int | None = None, products: str = ""
) -> GraphPrice:
    """Price a graph as Inductor runs it, one kernel after the other.

    Args:
        module: its nodes have their values, without memory, in ``meta["val"]``, as those of a `KernelGraph`. The call
            of a block costs what the block's graph does.
        hardware: what it runs on.
        footprint: bytes that go through the caches until the graph runs again: the sum of `GraphPrice.bytes` of all
            that the rank runs for one microbatch. They decide what it finds there. By default the graph's own.
        products: the name in the profile of the dtype in which bfloat16 matrices are multiplied; empty for their own.
    """
    pricing = _Pricing(hardware, products)
    pricing.footprint = max(pricing.bytes(module.graph) if footprint is None else footprint, 1)
    return pricing.graph(module.graph)


class _Pricing:
    """The price of a graph, and of the blocks that it calls, each once."""

    def __init__(self, hardware: Hardware, products: str) -> None:
        self.footprint = 1
        self._hardware, self._products = hardware, products
        self._kernels: dict[fx.Graph, list[FusedKernel]] = {}
        self._blocks: dict[fx.Graph, GraphPrice] = {}

    def bytes(self, graph: fx.Graph) -> int:
        """Bytes that all kernels read and write, those of blocks included."""
        kernel_bytes = sum(kernel.bytes for kernel in self._kernels_of(graph) if not _is_call(kernel))
        return kernel_bytes + sum(self.bytes(_block_graph(node, kind)) for node, kind in _block_calls(graph).items())

    def graph(self, graph: fx.Graph) -> GraphPrice:
        total = GraphPrice()
        calls = _block_calls(graph)
        touched: dict[fx.Node, int] = {}  # read or written → the bytes that had gone through the caches by then
        for kernel in self._kernels_of(graph):
            if not _is_call(kernel):
                total += self._kernel(kernel, self._reuse_distance(kernel, touched, total.bytes))
            elif kernel.nodes[0] in calls:
                total += self._block(_block_graph(kernel.nodes[0], calls[kernel.nodes[0]]))
            touched |= dict.fromkeys((*kernel.reads, *kernel.writes), total.bytes)
        return total

    def _kernels_of(self, graph: fx.Graph) -> list[FusedKernel]:
        if graph not in self._kernels:
            self._kernels[graph] = fused_kernels(graph)
        return self._kernels[graph]

    def _block(self, graph: fx.Graph) -> GraphPrice:
        if graph not in self._blocks:
            self._blocks[graph] = self.graph(graph)
        return self._blocks[graph]

    def _reuse_distance(self, kernel: FusedKernel, touched: Mapping[fx.Node, int], now: int) -> float:
        """Bytes that went through the caches since the kernel's memory did: a mean of logarithms, weighted by bytes.

        The graph's results are kept, so their memory is that of results of the last run, which were let go since then.
        The memory of other results has just been let go.
        """
        since = {base: now - touched[base] if base in touched else self.footprint for base in kernel.reads}
        sizes = {base: sum(views.values()) for base, views in kernel.reads.items()}
        for base in kernel.returned:
            since[base], sizes[base] = self.footprint, kernel.writes[base]
        total = sum(sizes.values())
        return math.exp(sum(sizes[base] * math.log(max(since[base], 1)) for base in sizes) / total) if total else 1.0

    def _kernel(self, kernel: FusedKernel, distance: float) -> GraphPrice:
        hardware, size = self._hardware, kernel.bytes
        work = kernel_work(kernel.nodes[0]) if kernel.role is FusionRole.KERNEL else None
        seconds = size / hardware.bytes_per_second(size, distance)
        if work is not None:
            is_cast = self._products and work.kind == "matmul" and work.dtype == "bfloat16"
            dtype = self._products if is_cast else work.dtype
            rate = hardware.flops_per_second(work.kind, dtype, distance, **work.sizes)
            seconds = max(seconds, work.flops * work.computed / rate)
        seconds += sum(elements / hardware.element_rates[name] for name, elements in self._rated_elements(kernel))
        if kernel.role is not FusionRole.SCATTER:
            seconds += sum(map(hardware.new_memory_seconds, kernel.writes.values()))
        return GraphPrice(
            max(hardware.kernel_overhead + seconds, hardware.kernel_floor),
            0 if work is None else work.flops,
            size,
            tuple(name_of(node) for node in kernel.nodes if is_uncounted(node)),
        )

    def _rated_elements(self, kernel: FusedKernel) -> Iterator[tuple[str, int]]:
        """The rates of the profile that bound the kernel's loops, and for how many elements."""
        rates = self._hardware.element_rates
        for node in kernel.nodes:
            name = rate_name(node)
            if name not in rates and kernel.role is FusionRole.ELEMENTWISE:
                name = OTHER_OPERATIONS
            if name in rates:
                yield name, loop_elements(node)
        for name, nodes in (("read bool", kernel.reads), ("write bool", kernel.writes)):
            if name in rates:
                yield name, sum(map(_boolean_elements, nodes))


def _is_call(kernel: FusedKernel) -> bool:
    return any(node.target is OPERATION for node in kernel.nodes)


def _block_calls(graph: fx.Graph) -> dict[fx.Node, str]:
    """Map each call of a block to the kind that runs. I and W of one call here run as its B, in the place of I."""
    nodes_by_call: dict[object, dict[str, fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=OPERATION):
        call, kind = call_of(node)
        nodes_by_call.setdefault(call, {})[kind] = node
    calls: dict[fx.Node, str] = {}
    for kinds in nodes_by_call.values():
        is_full = "I" in kinds and "W" in kinds
        calls |= {node: "B" if is_full else kind for kind, node in kinds.items() if not (is_full and kind == "W")}
    return calls


def _block_graph(node: fx.Node, kind: str) -> fx.Graph:
    return called_graph(node, kind).module.graph


def _boolean_elements(node: fx.Node) -> int:
    return sum(value.numel() for value in result_tensors(node) if value.dtype is torch.bool)
