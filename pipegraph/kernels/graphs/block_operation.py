"""The call of a block as one operation, so that the graph around it can be traced, differentiated and divided.

The call is one node for F, one for I and one for W, whatever the block holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from pipegraph.kernels.symbolic_sizes import SymbolicSizes
from pipegraph.torch_private.operators import OpOverload, argument_names

GradientMask = tuple[bool, ...]
"""Of each output of a function: whether a gradient arrives for it."""


@dataclass(frozen=True)
class KernelGraph:
    """The graph of one of F, I, W and B. Inputs and outputs are named as in the joint graph; no output comes twice.

    Attributes:
        module: the graph. Its placeholders are the sizes, then the inputs.
        inputs, outputs: the names of tensors.
        sizes: those that may differ between calls.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: SymbolicSizes

    def values_at(self, numbers: Sequence[Any]) -> list[Tensor]:
        """The outputs for these sizes, as fake tensors."""
        (end,) = self.module.graph.find_nodes(op="output")
        values: list[Tensor] = [node.meta["val"] for node in end.args[0]]
        return [
            torch.empty_strided(
                self.sizes.at(value.shape, numbers),
                self.sizes.at(value.stride(), numbers),
                dtype=value.dtype,
                device=value.device,
            )
            for value in values
        ]


class CallableBlock(Protocol):
    """The interface of a block that the operation calls."""

    @property
    def is_random(self) -> bool:
        """Whether its forward draws random numbers."""
        ...

    def graph(self, kind: str, mask: GradientMask) -> KernelGraph:
        """The graph of `kind`: F, I, W or B."""
        ...


_blocks: weakref.WeakValueDictionary[int, CallableBlock] = weakref.WeakValueDictionary()
_library = torch.library.Library("pipegraph", "FRAGMENT")
# `sizes` are those of the block's symbols. `kind` is F, I, W or B. `call` numbers the calls of a block: equal calls
# (dropout) stay apart, and I and W of one call are known to belong together.
_library.define("call(Tensor[] tensors, SymInt[] sizes, int block, str kind, bool[] mask, int call) -> Tensor[]")

OPERATION = torch.ops.pipegraph.call.default


@torch.library.register_fake("pipegraph::call", lib=_library)
def _results(
    tensors: Sequence[Tensor], sizes: Sequence[Any], block: int, kind: str, mask: Sequence[bool], call: int
) -> list[Tensor]:
    return _blocks[block].graph(kind, tuple(mask)).values_at(sizes)


def register(block: CallableBlock) -> int:
    """Return the number that stands for a block in a graph. Only a weak reference to the block is kept."""
    number = register.count = getattr(register, "count", 0) + 1  # type: ignore[attr-defined]
    _blocks[number] = block
    return number


def block_of(node: fx.Node) -> CallableBlock:
    """Return the block that a node of `OPERATION` calls."""
    return _blocks[node.args[2]]  # type: ignore[index]


def call_of(node: fx.Node) -> tuple[tuple[object, object], str]:
    """Return which call of which block a node of `OPERATION` belongs to, and the kind of graph that it runs."""
    _, _, block, kind, _, number = node.args
    return (block, number), str(kind)


def size_values(node: fx.Node) -> list[Any]:
    """Return the sizes with which a node of `OPERATION` calls its block: numbers or symbolic."""
    return [size.meta["val"] if isinstance(size, fx.Node) else size for size in node.args[1]]  # type: ignore[union-attr]


def called_graph(node: fx.Node, kind: str | None = None) -> KernelGraph:
    """Return the graph that a node of `OPERATION` runs; with `kind`, another one of the same call."""
    _, _, _, own_kind, mask, _ = node.args
    return block_of(node).graph(kind or str(own_kind), tuple(mask))  # type: ignore[arg-type]


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers, itself or in the block whose forward it calls."""
    operation = node.target
    if operation is OPERATION:
        return node.args[3] == "F" and block_of(node).is_random
    if not isinstance(operation, OpOverload) or torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    # The backward of attention has the tag too, but repeats the forward's numbers from the seed that it is given.
    return "philox_seed" not in argument_names(operation)
