"""A function of tensors, differentiated and divided: F, I, W and B. Calls of it are nodes of the graph around them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from pipegraph.debug import InvalidGraphError, dump, verifying
from pipegraph.errors import user_line
from pipegraph.kernels.graphs import block_operation
from pipegraph.kernels.graphs.block_operation import OPERATION, GradientMask, KernelGraph
from pipegraph.kernels.graphs.division import (
    BackwardGraphs,
    backward_graphs,
    base_of,
    forward_graph,
    saved_values,
)
from pipegraph.kernels.graphs.joint_graph import JointGraph, constant_of
from pipegraph.kernels.graphs.regions import Regions
from pipegraph.kernels.symbolic_sizes import Numbers, SizeMap, dimensions
from pipegraph.kernels.trace_guard import with_strides
from pipegraph.recompute import OFFLOAD
from pipegraph.torch_private.fake_tensors import fake_tensors
from pipegraph.torch_private.partitioner import outside_traces
from pipegraph.torch_private.pytrees import tree_leaves

# ---- checks ----------------------------------------------------------------------------------------------------------
# Two checks: of each division, with `PIPEGRAPH_VERIFY=1`, and of a joint graph at sizes of 1.


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


# ---- divided function ------------------------------------------------------------------------------------------------


# What torch raises where Python asks for the value of a fake tensor.
_NUMBER_TAKEN = "DataDependentOutputException", "GuardOnDataDependentSymNode"


def reason_of(error: Exception) -> str:
    """Why something cannot be traced, in one line, with the line of the user's source that did it."""
    is_number = type(error).__name__ in _NUMBER_TAKEN
    reason = "a number is taken out of a tensor, as .item() and branches on values do" if is_number else text_of(error)
    line = user_line(error)
    return f"{reason}, at {line}" if line else reason


def text_of(error: Exception) -> str:
    """The type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no reason given'}"


class DividedFunction:
    """The joint graph of a stage or of a block, divided. All calls of equal blocks share one.

    Args:
        name: of its class.
        joint: the joint graph.
        is_input: of each primal, whether its gradient belongs to I.
        regions: what the backward computes again.
        blocks: the blocks that the graph calls by number. They live as long as this does.
        inlined: the repeated modules that could not be traced by themselves and are part of this graph, and why: by
            their classes.
        draws: the modules that draw random numbers, by their names in this one, once for each draw. If there are any,
            the last primal holds their keys.

    Attributes:
        sizes: those that may differ between calls.
        family: of a block, equal for those that differ in sizes alone.
    """

    def __init__(
        self,
        name: str,
        joint: JointGraph,
        is_input: Sequence[bool],
        regions: Regions,
        blocks: Sequence[DividedFunction],
        inlined: Mapping[str, str],
        draws: Sequence[str] = (),
    ) -> None:
        self.name, self.joint, self.sizes = name, joint, joint.sizes
        self.number = block_operation.register(self)
        self.family: Any = None
        self.programs: dict[Any, Any] = {}  # what compilers have made of the graphs
        self._strides: dict[fx.Node, SizeMap] = {}
        self._runs_with_ones: dict[tuple[bool, ...], bool] = {}  # by which sizes are 1
        self.blocks = tuple(blocks)
        self.inlined = dict(inlined)
        self.draws = tuple(draws)
        self._is_input = tuple(is_input)
        self._regions, self._saved = regions, saved_values(joint, regions)
        self._backward: dict[GradientMask, BackwardGraphs] = {}
        self._dump("joint", joint.module)

    def with_regions(self, regions: Regions) -> DividedFunction:
        """The same joint graph, divided so that the backward computes something else again."""
        return DividedFunction(self.name, self.joint, self._is_input, regions, self.blocks, self.inlined, self.draws)

    @cached_property
    def full_mask(self) -> GradientMask:
        """The outputs that can have a gradient."""
        return tuple(tangent is not None for tangent in self.joint.tangents)

    @cached_property
    def is_random(self) -> bool:
        """Whether the forward or the backward draws random numbers."""
        return any(map(block_operation.is_random, self.joint.module.graph.nodes))

    @cached_property
    def forward(self) -> KernelGraph:
        """F."""
        backward = self.backward(self.full_mask)
        with outside_traces():
            forward = forward_graph(self.joint, self._saved, backward.graphs)
        self._dump("F", forward.module)
        if verifying():
            check_division(self.joint, forward, backward, self._is_input, self.full_mask)
        return forward

    def begins_elsewhere(self, device: str) -> str | None:
        """The name of a value that is computed from no other, and is not on this type of device; None without any."""
        for node in self.joint.module.graph.nodes:
            if node.op in ("placeholder", "get_attr") or block_operation.is_random(node):
                first, *_ = tree_leaves(node.meta.get("val", constant_of(self.joint.module, node)))
                if isinstance(first, Tensor) and first.device.type != device:  # a seed may follow on the host
                    return str(node.name)
        names = (block.begins_elsewhere(device) for block in self.blocks)
        return next((name for name in names if name is not None), None)

    def backward(self, mask: GradientMask) -> BackwardGraphs:
        """I, W and B for the outputs in `mask`."""
        if mask not in self._backward:
            with outside_traces():  # a block is divided while the graph around it is traced
                backward = self._backward[mask] = backward_graphs(self.joint, self._saved, self._is_input, mask)
            for kind, graph in (("I", backward.input), ("W", backward.weight), ("B", backward.full)):
                if graph is not None:
                    self._dump(kind, graph.module)
            if verifying() and mask != self.full_mask:
                check_division(self.joint, self.forward, backward, self._is_input, mask)
        return self._backward[mask]

    def weight_gradients(self, mask: GradientMask) -> frozenset[str]:
        """The names of the gradients that belong to W."""
        pairs = zip(self.backward(mask).gradients, self._is_input, strict=True)
        return frozenset(name for name, of_input in pairs if name is not None and not of_input)

    def graph(self, kind: str, mask: GradientMask) -> KernelGraph:
        """One of F, I, W and B."""
        if kind == "F":
            return self.forward
        backward = self.backward(mask)
        graph = {"I": backward.input, "W": backward.weight, "B": backward.full}[kind]
        assert graph is not None
        return graph

    def saved(self, mask: GradientMask) -> tuple[str, ...]:
        """The results of F and the primals that the backward reads."""
        available = {*self.forward.outputs, *(node.name for node in self.joint.primals)}
        read = (name for graph in self.backward(mask).graphs for name in graph.inputs)
        return tuple(dict.fromkeys(name for name in read if name in available))

    @cached_property
    def offloaded(self) -> frozenset[str]:
        """The results of F that the backward reads, and that wait for it in CPU memory."""
        nodes = {node.name: node for node in self.joint.module.graph.nodes}
        saved_names = set(self.saved(self.full_mask)) - {node.name for node in self.joint.primals}
        return frozenset(name for name in saved_names if self.is_offloaded(nodes[name]))

    def is_offloaded(self, node: fx.Node) -> bool:
        """Return whether a result, if the backward reads it, waits for it in CPU memory."""
        call = node.args[0] if node.target is operator.getitem else None
        if isinstance(call, fx.Node) and call.target is OPERATION:
            block: Any = block_operation.block_of(call)  # its modules may have choices of their own
            name = block_operation.called_graph(call).outputs[node.args[1]]  # type: ignore[index]
            inner = next(inner_node for inner_node in block.joint.module.graph.nodes if inner_node.name == name)
            return bool(block.is_offloaded(base_of(inner)))
        return self._regions.region_of(node).choice == OFFLOAD

    def hold(self, numbers: Numbers) -> bool:
        """Return whether the graphs are right for these sizes, those of the blocks that they call included."""
        if not self.sizes.hold(numbers):
            return False
        ones_mask = tuple(number == 1 for number in numbers)
        if any(ones_mask) and ones_mask not in self._runs_with_ones:
            self._runs_with_ones[ones_mask] = runs_as_traced(self.joint, numbers)
        calls = ((block, size_map(numbers)) for block, size_map in self._symbolic_calls)
        return self._runs_with_ones.get(ones_mask, True) and all(block.hold(sizes) for block, sizes in calls)

    def strides(self, node: fx.Node, numbers: Numbers) -> Numbers:
        """Return the strides of a node's tensor for these sizes."""
        if not self.sizes:
            strides: Numbers = node.meta["val"].stride()
            return strides
        if node not in self._strides:
            self._strides[node] = SizeMap(self.sizes, node.meta["val"].stride())
        return self._strides[node](numbers)

    @cached_property
    def _symbolic_calls(self) -> list[tuple[DividedFunction, SizeMap]]:
        """The blocks with sizes that the forward calls. The backward calls them with the same sizes."""
        nodes = self.joint.module.graph.find_nodes(op="call_function", target=OPERATION)
        blocks = {(block.number, values): block for block, values in map(_called_with, nodes) if block.sizes}
        return [(block, SizeMap(self.sizes, values)) for (_, values), block in blocks.items()]

    def call(self, number: int, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> tuple[Tensor, ...]:
        """Call the block in a graph that is being traced, with gradients.

        Args:
            number: of this call among those of the graph.
            tensors: the primals, in order.
            sizes: what the block's sizes are in this call.

        Returns:
            The outputs, then the new values of the primals that the function writes to.
        """
        results: tuple[Tensor, ...] = _BlockFunction.apply(self, number, sizes, *tensors)
        return results

    def _dump(self, kind: str, module: fx.GraphModule) -> None:
        dump(f"{self.name}_{self.number}_{kind}", lambda: module.print_readable(print_output=False))


def _called_with(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The block that a node calls, and the sizes for it as expressions of the caller's."""
    return block_operation.block_of(node), dimensions(block_operation.size_values(node))


class _BlockFunction(torch.autograd.Function):
    """Autograd's view of a call: one operation forward, I and W backward."""

    @staticmethod
    def forward(
        ctx: Any, block: DividedFunction, number: int, sizes: Sequence[Any], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        joint = block.joint
        values = {node.name: tensor for node, tensor in zip(joint.primals, tensors, strict=True)}
        _run(values, block, "F", (), number, sizes)
        ctx.block, ctx.number, ctx.sizes, ctx.names = block, number, sizes, block.saved(block.full_mask)
        ctx.save_for_backward(*(values[name] for name in ctx.names))
        ctx.set_materialize_grads(False)
        results = [values[node.name] for node in (*joint.outputs, *joint.written.values())]
        # One tensor may be two outputs, which autograd refuses.
        first = {id(output): index for index, output in reversed(list(enumerate(results)))}
        results = [
            output if first[id(output)] == index else output.view_as(output) for index, output in enumerate(results)
        ]
        differentiable = (*block.full_mask, *[False] * len(joint.written))
        ctx.mark_non_differentiable(*(output for output, is_ in zip(results, differentiable, strict=True) if not is_))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        block: DividedFunction = ctx.block
        pairs = list(zip(block.joint.tangents, gradients, strict=False))
        mask = tuple(node is not None and gradient is not None for node, gradient in pairs)
        values = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        for node, gradient in pairs:
            if node is not None and gradient is not None:
                values[node.name] = with_strides(gradient, block.sizes.at(node.meta["val"].stride(), ctx.sizes))
        backward = block.backward(mask)
        for kind, graph in (("I", backward.input), ("W", backward.weight)):
            if graph is not None:
                _run(values, block, kind, mask, ctx.number, ctx.sizes)
        return (None, None, None, *(None if name is None else values[name] for name in backward.gradients))


def _run(
    values: dict[str, Tensor], block: DividedFunction, kind: str, mask: GradientMask, number: int, sizes: Sequence[Any]
) -> None:
    graph = block.graph(kind, mask)
    results = OPERATION([values[name] for name in graph.inputs], list(sizes), block.number, kind, list(mask), number)
    values |= zip(graph.outputs, results, strict=True)
