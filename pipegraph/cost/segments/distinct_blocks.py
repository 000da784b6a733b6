"""The distinct blocks of a chain: segments and layers of equal structure, traced once, without memory.

A block's joint graph is divided into F, I and W as the kernels of a stage are, so that what is priced is what runs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pipegraph.cost.model_output import LossOf, default_loss, loss_of_pieces
from pipegraph.cost.roofline.fused_kernels import FusedKernel, fused_attention, fused_kernels, value_size
from pipegraph.cost.roofline.operator_work import FusionRole
from pipegraph.cost.segments.chain import Chain
from pipegraph.cost.segments.subgraph import Subgraph, SubgraphModule, empty_like_value, subgraph_of
from pipegraph.graph.nodes import path_of
from pipegraph.kernels import Loss
from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.kernels.compilers import compiler, options
from pipegraph.kernels.gradient_products import products_of
from pipegraph.kernels.graphs.block_operation import KernelGraph
from pipegraph.kernels.graphs.division import base_of, is_view
from pipegraph.kernels.graphs.joint_graph import JointGraph
from pipegraph.kernels.graphs.regions import Regions, place_of
from pipegraph.kernels.stage_variant import StageCall, StageSpec, trace
from pipegraph.kernels.trace_guard import ModuleState
from pipegraph.progress import report_progress
from pipegraph.recompute import DEFAULT, EVERYWHERE, OFFLOAD, Recompute, Region
from pipegraph.schedule import Kind
from pipegraph.torch_private.fake_tensors import fake_tensors
from pipegraph.torch_private.pytrees import pytree

# ---- saved memory ----------------------------------------------------------------------------------------------------
# What a piece of a model keeps for its backward, and who else may hold it.


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


# ---- live ranges -----------------------------------------------------------------------------------------------------
# What the graphs of a block hold in memory while they run, by the live ranges of their values.


def peak_bytes(kernel_graph: KernelGraph, dropped: Collection[str] = (), gradients: Collection[str] = ()) -> int:
    """Return the peak bytes of a graph while it runs, without the memory allocated before, kernel by kernel.

    A value that only the kernel that computes it reads is never in memory. Any other value is in memory from the kernel
    that computes it to the last one that reads it, or to the end if the graph returns it. Products that are gradients
    run last, and are added to memory that exists. A kernel counts as the larger of two ways to run it: compiled, all of
    its results are in memory next to its inputs, or overwrite them; not compiled, its operations run one by one.

    Args:
        kernel_graph: its nodes have their values, as fake tensors, in ``meta["val"]``.
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
    """Return the bytes of results that loops write over earlier values of the same size that no later kernel
    reads."""
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


# ---- distinct blocks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Block:
    """The code that pieces of equal structure share.

    Attributes:
        key: equal for equal structure and loss, in every process.
        subgraph: the first piece.
        count: how many pieces there are.
        regions: what its backward computes again.
        loss, target: for the model's last piece.
        derivative: its graphs; None if it cannot be traced by itself.
        refusal: why it cannot be traced.
    """

    key: str
    subgraph: Subgraph
    count: int
    regions: Regions
    loss: Loss | None
    target: Any
    derivative: DividedFunction | None = field(repr=False, default=None)
    refusal: str = ""

    @property
    def graphs(self) -> tuple[fx.GraphModule | None, fx.GraphModule | None, fx.GraphModule | None]:
        """F, I and W. If no input has a gradient there is no I, and W does the whole backward."""
        assert self.derivative is not None
        backward = self.derivative.backward(self.derivative.full_mask)
        parts = self.derivative.forward, backward.input, backward.weight
        forward, of_inputs, of_weights = (None if part is None else part.module for part in parts)
        return forward, of_inputs, of_weights

    @property
    def has_input_grad(self) -> bool:
        """Whether the block has an I: whether one of its inputs has a gradient."""
        return any(self.subgraph.input_gradients) if self.derivative is None else self.graphs[1] is not None

    @cached_property
    def saved(self) -> SavedMemory:
        """The memory that F keeps; if that is not known, every value that has a gradient."""
        if self.derivative is None:
            return unknown_memory(self.subgraph)
        return kept_memory(self.subgraph, self.derivative.joint, self.derivative.saved(self.derivative.full_mask))

    @cached_property
    def offloads(self) -> bool:
        """Whether something of what F keeps waits for the backward in CPU memory."""
        choices = {region.choice for region in (self.regions.default, *self.regions.places.values())}
        return self.derivative is not None and OFFLOAD in choices

    @cached_property
    def offloaded(self) -> SavedMemory:
        """Of the memory that F keeps, what waits for the backward in that of the host, without what crosses."""
        if self.derivative is None or not self.offloads:
            return SavedMemory()
        return kept_memory(self.subgraph, self.derivative.joint, self.derivative.offloaded)

    @cached_property
    def offloaded_outputs(self) -> tuple[int, ...]:
        """The positions of outputs that wait there, if this block or another one keeps them."""
        if self.derivative is None or not self.offloads:
            return ()
        outputs = self.derivative.joint.outputs[: len(self.subgraph.outputs)]
        return tuple(index for index, node in enumerate(outputs) if self.derivative.is_offloaded(base_of(node)))

    @cached_property
    def weight_saved(self) -> SavedMemory:
        """The memory kept from the end of I to the end of W: what W reads; without I everything, and the received
        gradients. If that is not known, as much as F keeps.
        """
        if self.derivative is None:
            return self.saved
        joint, present = self.derivative.joint, self.derivative.full_mask
        backward = self.derivative.backward(present)
        if backward.input is not None:
            return kept_memory(self.subgraph, joint, () if backward.weight is None else backward.weight.inputs)
        tangent_names = (node.name for node in joint.tangents if node is not None)
        return kept_memory(self.subgraph, joint, (*self.derivative.saved(present), *tangent_names))

    @cached_property
    def added(self) -> frozenset[int]:
        """The positions in the state of parameters whose gradients are made before they are added to others.

        Those of others are added while they are computed (`pipegraph.kernels.gradient_products`).
        """
        if self.derivative is None:
            return frozenset(range(len(self.subgraph.state)))
        mask = self.derivative.full_mask
        backward, of_weights = self.derivative.backward(mask), self.derivative.weight_gradients(mask)
        separate_names = of_weights - products_of(backward.full, of_weights).keys()
        names = backward.gradients[: len(self.subgraph.state)]
        return frozenset(index for index, name in enumerate(names) if name in separate_names)

    @cached_property
    def peaks(self) -> BlockPeaks:
        """What its graphs hold while they run."""
        return block_peaks(self.subgraph, self.derivative)


@dataclass(frozen=True, eq=False)
class SegmentGroup:
    """Consecutive segments of a chain, taken as one piece, and their block.

    ``region`` is the module whose region contains the whole piece and is computed again from its inputs; empty if no
    region does.
    """

    segments: range
    subgraph: Subgraph
    block: Block
    region: str


@dataclass(frozen=True, eq=False)
class SegmentGroups:
    """A chain in three grains: segments, layers and runs of layers. A piece is fused across the cuts in it.

    Attributes:
        chain: the chain.
        segments: each segment of it.
        layers: the layers that are more than one segment.
        runs: neighbouring layers that the model has once each. A stage computes a run in one piece, and a repeated
            layer by itself.
    """

    chain: Chain
    segments: tuple[SegmentGroup, ...]
    layers: tuple[SegmentGroup, ...]
    runs: tuple[SegmentGroup, ...]

    def blocks(self) -> tuple[Block, ...]:
        """Each distinct block once, in the order in which the model has run it, the smaller ones first."""
        every = (*self.segments, *self.layers, *self.runs)
        in_order = sorted(every, key=lambda part: (part.segments.stop, len(part.segments)))
        return tuple({part.block.key: part.block for part in in_order}.values())

    def largest(self, stage: range) -> list[SegmentGroup]:
        """Return the parts that make up the segments in ``stage``: runs and layers if they are whole, else segments."""
        at: dict[int, list[SegmentGroup]] = {}
        for part in (*self.runs, *self.layers, *self.segments):
            if part.segments.stop <= stage.stop:
                at.setdefault(part.segments.start, []).append(part)
        parts, index = [], stage.start
        while index < stage.stop:
            part = max(at[index], key=lambda candidate: len(candidate.segments))
            parts.append(part)
            index = part.segments.stop
        return parts

    @cached_property
    def last_reader(self) -> dict[fx.Node, int]:
        """Of each value that a segment takes, the last segment that does."""
        return {node: index for index, part in enumerate(self.segments) for node in part.subgraph.inputs}


# Tracing and dividing a graph takes time that grows faster than the graph.
_LONGEST_RUN = 1000  # operations


@dataclass(frozen=True)
class BlockOptions:
    """How blocks are traced.

    Attributes:
        loss: a function of output and target, and a target; None for `default_loss`.
        recompute: what the backward computes again. In a model with repeated layers "block" without a pattern holds
            for these; the code between them keeps what "min-cut" keeps.
        gpu: whether to trace for a GPU, whatever this machine has.
        traced: what was traced for the same loss, by the kind of device and `Subgraph.key`. Only the division depends
            on ``recompute``.
    """

    loss: tuple[LossOf, Any] | None = None
    recompute: Recompute = EVERYWHERE
    gpu: bool = False
    traced: dict[str, DividedFunction] = field(default_factory=dict)


def group_segments(chain: Chain, tracing: BlockOptions) -> SegmentGroups:
    """Return the parts of a chain with their blocks, each traced once."""
    layer_set = set(chain.layers)
    keys = Counter(subgraph_of(chain.captured, chain.nodes(layer.start, layer.stop)).key for layer in layer_set)
    repeats = len(keys) < len(layer_set)
    counts: Counter[str] = Counter()
    blocks: dict[tuple[str, object], Block] = {}
    regions: dict[range, Regions] = {}

    def parts(runs: Iterable[range]) -> tuple[SegmentGroup, ...]:
        subgraphs = [(run, subgraph_of(chain.captured, chain.nodes(run.start, run.stop))) for run in runs]
        counts.update(subgraph.key for _, subgraph in subgraphs)
        total = len({*(key for key, _ in blocks), *(subgraph.key for _, subgraph in subgraphs)})
        for run, subgraph in subgraphs:
            between = repeats and not (run in layer_set and counts[subgraph.key] > 1)
            regions[run] = _regions(subgraph, tracing.recompute, between)
            key = subgraph.key, regions[run].signature[1]
            if key not in blocks:
                report_progress("pricing distinct blocks", len(blocks), total)
                blocks[key] = _block(subgraph, counts[subgraph.key], regions[run], tracing)
        return tuple(
            SegmentGroup(
                run,
                subgraph,
                blocks[subgraph.key, regions[run].signature[1]],
                _region_around(subgraph, tracing.recompute),
            )
            for run, subgraph in subgraphs
        )

    segments = parts(range(index, index + 1) for index in range(len(chain.segments)))
    layers = parts(layer for layer in chain.layers if len(layer) > 1)
    single = {part.segments: part.block.count == 1 for part in (*segments, *layers)}
    grouped = groupby(chain.layers, key=lambda layer: single[layer])
    joined = [list(group) for alone, group in grouped if alone]
    runs = [range(group[0].start, group[-1].stop) for group in joined if len(group) > 1]
    short = (run for run in runs if len(chain.nodes(run.start, run.stop)) <= _LONGEST_RUN)
    return SegmentGroups(chain, segments, layers, parts(short))


def _regions(subgraph: Subgraph, recompute: Recompute, between: bool) -> Regions:
    """Return the regions of a piece, numbered in its order, by the positions of its operations."""
    default = Region("", DEFAULT if recompute.default == "block" and between else recompute.default)
    numbers: dict[str, str] = {}
    places: dict[int, Region] = {}
    for position, node in enumerate(subgraph.nodes if recompute.rules else ()):
        region = recompute.region(tuple(fqn for _, fqn in path_of(node)))
        if region.module:
            number = numbers.setdefault(region.module, str(1 + len(numbers)))
            places[position] = Region(number, region.choice)
    return Regions(default, places)


def _region_around(subgraph: Subgraph, recompute: Recompute) -> str:
    """Return the module of the "block" region that contains all operations of a piece; empty if no region does."""
    if not recompute.rules:
        return ""
    scopes = {recompute.region(tuple(fqn for _, fqn in path_of(node))) for node in subgraph.nodes}
    return next(iter(scopes)).module if {region.choice for region in scopes} == {"block"} and len(scopes) == 1 else ""


def _block(subgraph: Subgraph, count: int, regions: Regions, tracing: BlockOptions) -> Block:
    function, target = (tracing.loss or (default_loss, None)) if subgraph.last else (None, None)
    packed = None if function is None else loss_of_pieces(subgraph.captured, function)
    try:
        derivative = _divided(subgraph, packed, target, tracing, regions)
    except Exception as error:  # whatever an operation raises on a fake tensor
        reason = str(error).strip().partition("\n")[0] or "no reason given"
        refusal = f"{type(error).__name__}: {reason}"
        return Block(_key(subgraph, regions), subgraph, count, regions, packed, target, None, refusal)
    key = _key(subgraph, regions)
    key = _with_loss(key, derivative) if subgraph.last else key
    return Block(key, subgraph, count, regions, packed, target, derivative)


def _key(subgraph: Subgraph, regions: Regions) -> str:
    """Return a key that is equal for pieces of equal structure and regions. It does not depend on the default."""
    if not regions.places:
        return subgraph.key
    return hashlib.sha256(f"{subgraph.key} {regions.signature[1]}".encode()).hexdigest()


def _divided(
    subgraph: Subgraph, loss: Loss | None, target: Any, tracing: BlockOptions, regions: Regions
) -> DividedFunction:
    key = f"{'gpu' if tracing.gpu else 'cpu'} {subgraph.key}"
    cached_derivative = tracing.traced.get(key)
    if cached_derivative is not None:
        return cached_derivative.with_regions(regions)
    derivative = tracing.traced[key] = _traced(subgraph, loss, target, tracing, regions)
    return derivative


def _traced(
    subgraph: Subgraph, loss: Loss | None, target: Any, tracing: BlockOptions, regions: Regions
) -> DividedFunction:
    instead = {torch.ops.aten.scaled_dot_product_attention.default: fused_attention} if tracing.gpu else None
    with fake_tensors():
        state = [empty_like_value(node.meta["val"]) for node in subgraph.state]
        module = SubgraphModule(subgraph, state, instead=instead)
        inputs = [empty_like_value(node.meta["val"]) for node in subgraph.inputs]
        target = pytree.tree_map_only(Tensor, empty_like_value, target)
    call = StageCall.from_arguments(inputs, target, loss is not None, True)
    stage = StageSpec(module, subgraph.input_gradients, subgraph.output_gradients, loss)
    modules = list(module.modules())
    variant = trace(stage, modules, ModuleState(modules), call, compiler("eager"), options("inductor", regions))
    return variant.divided


def _with_loss(key: str, derivative: DividedFunction) -> str:
    """Hash the operations of the loss: a function has no hash that is equal in every process."""
    lines = [f"{node.target} {node.args} {node.kwargs}" for node in derivative.joint.module.graph.nodes]
    return hashlib.sha256("\n".join([key, *lines]).encode()).hexdigest()
