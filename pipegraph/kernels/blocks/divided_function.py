"""A function of tensors, differentiated and divided: F, I, W and B. Calls of it are nodes of the graph around them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from pipegraph.dump import dump
from pipegraph.kernels.gradients import with_strides
from pipegraph.kernels.graphs import block_operation
from pipegraph.kernels.graphs.block_operation import OPERATION, GradientMask, KernelGraph
from pipegraph.kernels.graphs.division import BackwardGraphs, backward_graphs, forward_graph, saved_values
from pipegraph.kernels.graphs.division_check import check_division
from pipegraph.kernels.graphs.joint_graph import JointGraph
from pipegraph.verification import verifying


class DividedFunction:
    """The joint graph of a stage or of a block, divided. All calls of equal blocks share one.

    Args:
        name: in dumps.
        joint: the joint graph.
        is_input: of each primal, whether its gradient belongs to I.
        recompute: what the backward computes again, one of `registry.RECOMPUTE`.
        blocks: the blocks that the graph calls by number. They live as long as this does.
    """

    def __init__(
        self, name: str, joint: JointGraph, is_input: Sequence[bool], recompute: str, blocks: Sequence[DividedFunction]
    ) -> None:
        self.joint = joint
        self.number = block_operation.register(self)
        self._label = name
        self._name = f"{name}_{self.number}"  # by this number other graphs call it
        self.programs: dict[Any, Any] = {}  # what compilers have made of the graphs
        self.blocks = tuple(blocks)
        self._is_input = tuple(is_input)
        self._saved = saved_values(joint, recompute)
        self._backward: dict[GradientMask, BackwardGraphs] = {}
        self._dump("joint", joint.module)

    def with_recompute(self, recompute: str) -> DividedFunction:
        """The same joint graph, divided so that the backward computes something else again."""
        return DividedFunction(self._label, self.joint, self._is_input, recompute, self.blocks)

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
        forward = forward_graph(self.joint, self._saved, backward.graphs)
        self._dump("F", forward.module)
        if verifying():
            check_division(self.joint, forward, backward, self._is_input, self.full_mask)
        return forward

    def backward(self, mask: GradientMask) -> BackwardGraphs:
        """I, W and B for the outputs in `mask`."""
        if mask not in self._backward:
            backward = self._backward[mask] = backward_graphs(self.joint, self._saved, self._is_input, mask)
            for kind, graph in (("I", backward.input), ("W", backward.weight), ("B", backward.whole)):
                if graph is not None:
                    self._dump(kind, graph.module)
            if verifying() and mask != self.full_mask:
                check_division(self.joint, self.forward, backward, self._is_input, mask)
        return self._backward[mask]

    def graph(self, kind: str, mask: GradientMask) -> KernelGraph:
        """One of F, I, W and B."""
        if kind == "F":
            return self.forward
        backward = self.backward(mask)
        graph = {"I": backward.input, "W": backward.weight, "B": backward.whole}[kind]
        assert graph is not None
        return graph

    def saved(self, mask: GradientMask) -> tuple[str, ...]:
        """The results of F and the primals that the backward reads."""
        available = {*self.forward.outputs, *(node.name for node in self.joint.primals)}
        read = (name for graph in self.backward(mask).graphs for name in graph.inputs)
        return tuple(dict.fromkeys(name for name in read if name in available))

    def call(self, number: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call the block in a graph that is being traced, with gradients.

        Args:
            number: of this call among those of the graph.
            tensors: the primals, in order.

        Returns:
            The outputs, then the new values of the primals that the function writes to.
        """
        results: tuple[Tensor, ...] = _BlockFunction.apply(self, number, *tensors)
        return results

    def _dump(self, kind: str, module: fx.GraphModule) -> None:
        dump(f"{self._name}_{kind}", lambda: module.print_readable(print_output=False))


class _BlockFunction(torch.autograd.Function):
    """Autograd's view of a call: one operation forward, I and W backward."""

    @staticmethod
    def forward(ctx: Any, block: DividedFunction, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        joint = block.joint
        values = {node.name: tensor for node, tensor in zip(joint.primals, tensors, strict=True)}
        _run(values, block, "F", (), number)
        ctx.block, ctx.number, ctx.names = block, number, block.saved(block.full_mask)
        ctx.save_for_backward(*(values[name] for name in ctx.names))
        ctx.set_materialize_grads(False)
        results = [values[node.name] for node in (*joint.outputs, *joint.written.values())]
        # One tensor may be two outputs, which autograd refuses.
        first = {id(each): index for index, each in reversed(list(enumerate(results)))}
        results = [each if first[id(each)] == index else each.view_as(each) for index, each in enumerate(results)]
        differentiable = (*block.full_mask, *[False] * len(joint.written))
        ctx.mark_non_differentiable(*(each for each, is_ in zip(results, differentiable, strict=True) if not is_))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        block: DividedFunction = ctx.block
        pairs = list(zip(block.joint.tangents, gradients, strict=False))
        mask = tuple(node is not None and gradient is not None for node, gradient in pairs)
        values = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        for node, gradient in pairs:
            if node is not None and gradient is not None:
                values[node.name] = with_strides(gradient, node.meta["val"])
        backward = block.backward(mask)
        for kind, graph in (("I", backward.input), ("W", backward.weight)):
            if graph is not None:
                _run(values, block, kind, mask, ctx.number)
        return (None, None, *(None if name is None else values[name] for name in backward.gradients))


def _run(values: dict[str, Tensor], block: DividedFunction, kind: str, mask: GradientMask, number: int) -> None:
    graph = block.graph(kind, mask)
    results = OPERATION([values[name] for name in graph.inputs], block.number, kind, list(mask), number)
    values |= zip(graph.outputs, results, strict=True)
