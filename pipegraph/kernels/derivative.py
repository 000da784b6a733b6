"""A function of tensors with its derivative: F, I, W and B, as graphs and, once asked for, as programs that run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from pipegraph.kernels import block_call
from pipegraph.kernels.divide import Backward, Part, backward_parts, forward_part, saved_values
from pipegraph.kernels.joint import Joint

Present = tuple[bool, ...]


class Derivative:
    """A joint graph, divided. One for all calls of equal blocks.

    `is_input` says of each primal whether its gradient belongs to I; `present` of each output, in what follows,
    whether a gradient comes from it.
    """

    def __init__(self, joint: Joint, is_input: Sequence[bool], recompute: str, blocks: Sequence[Derivative]) -> None:
        self.joint = joint
        self.number = block_call.register(self)
        self.programs: dict[Any, Any] = {}  # what a compiler made of it
        self._is_input = tuple(is_input)
        self._kept = saved_values(joint, recompute)
        self._backward: dict[Present, Backward] = {}
        self._blocks = tuple(blocks)  # whose numbers stand in the graph

    @cached_property
    def all_present(self) -> Present:
        """The outputs that a gradient may come from."""
        return tuple(tangent is not None for tangent in self.joint.tangents)

    @cached_property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return any(map(block_call.is_random, self.joint.module.graph.nodes))

    @cached_property
    def forward(self) -> Part:
        """F."""
        return forward_part(self.joint, self._kept, self.backward(self.all_present).parts)

    def backward(self, present: Present) -> Backward:
        """I, W and B."""
        if present not in self._backward:
            self._backward[present] = backward_parts(self.joint, self._kept, self._is_input, present)
        return self._backward[present]

    def part(self, kind: str, present: Present) -> Part:
        """One of F, I, W and B."""
        if kind == "F":
            return self.forward
        backward = self.backward(present)
        part = {"I": backward.input, "W": backward.weight, "B": backward.whole}[kind]
        assert part is not None
        return part

    def saved(self, present: Present) -> tuple[str, ...]:
        """What the backward reads of F's results and of the primals."""
        parts = self.backward(present).parts
        ready = {*self.forward.outputs, *(node.name for node in self.joint.primals)}
        return tuple(dict.fromkeys(name for part in parts for name in part.inputs if name in ready))
