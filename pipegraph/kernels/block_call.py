"""The call of a block as one operation, so that the graph around it can be traced, differentiated and divided.

While a stage is traced, the call of a block gives F of the block, and the backward through it I and W: three nodes,
whatever the block holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from pipegraph.kernels.strides import with_strides

if TYPE_CHECKING:
    from pipegraph.kernels.derivative import Derivative

_known: weakref.WeakValueDictionary[int, Derivative] = weakref.WeakValueDictionary()

_library = torch.library.Library("pipegraph", "FRAGMENT")
# `kind` is F, I, W or B; `present` says of each output whether a gradient comes from it; `call` numbers the block's
# calls, so that equal ones (dropout) stay two, and I and W of one call are known to belong together.
_library.define("call(Tensor[] tensors, int block, str kind, bool[] present, int call) -> Tensor[]")

OPERATION = torch.ops.pipegraph.call.default


@torch.library.register_fake("pipegraph::call", lib=_library)
def _results(tensors: Sequence[Tensor], block: int, kind: str, present: Sequence[bool], call: int) -> list[Tensor]:
    part = _known[block].part(kind, tuple(present))
    return [
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        for value in part.values
    ]


def register(block: Derivative) -> int:
    """The number that stands for a block in a graph. The block lives as long as someone else holds it."""
    number = register.count = getattr(register, "count", 0) + 1  # type: ignore[attr-defined]
    _known[number] = block
    return number


def block_of(node: fx.Node) -> Derivative:
    """The block that a node of `OPERATION` calls."""
    return _known[node.args[1]]  # type: ignore[index]


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers, itself or in the block whose forward it calls."""
    operation = node.target
    if operation is OPERATION:
        return node.args[2] == "F" and block_of(node).is_random
    if not isinstance(operation, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    # The backward of attention has the tag too, but makes the numbers of the forward again, whose seed it is given.
    return not any(argument.name == "philox_seed" for argument in operation._schema.arguments)


def call(block: Derivative, number: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of a block and the new values of what it writes to, for `tensors` in the order of its primals."""
    found: tuple[Tensor, ...] = _Call.apply(block, number, *tensors)
    return found


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Derivative, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        joint = block.joint
        values = {node.name: tensor for node, tensor in zip(joint.primals, tensors, strict=True)}
        _run(values, block, "F", (), number)
        present = tuple(tangent is not None for tangent in joint.tangents)
        ctx.block, ctx.number, ctx.names = block, number, block.saved(present)
        ctx.save_for_backward(*(values[name] for name in ctx.names))
        ctx.set_materialize_grads(False)
        results = [values[node.name] for node in (*joint.outputs, *joint.written.values())]
        # One tensor may be two outputs, which autograd does not take.
        results = [each.view_as(each) if index != _first(results, each) else each for index, each in enumerate(results)]
        ctx.mark_non_differentiable(
            *(each for each, comes in zip(results, (*present, *[False] * len(joint.written)), strict=True) if not comes)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        block = ctx.block
        tangents = block.joint.tangents
        present = tuple(
            node is not None and gradient is not None for node, gradient in zip(tangents, gradients, strict=False)
        )
        values = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        for node, gradient in zip(tangents, gradients, strict=False):
            if node is not None and gradient is not None:
                values[node.name] = with_strides(gradient, node.meta["val"])
        backward = block.backward(present)
        if backward.input is not None:
            _run(values, block, "I", present, ctx.number)
        if backward.weight is not None:
            _run(values, block, "W", present, ctx.number)
        return (None, None, *(None if name is None else values[name] for name in backward.gradients))


def _run(values: dict[str, Tensor], block: Derivative, kind: str, present: tuple[bool, ...], number: int) -> None:
    part = block.part(kind, present)
    results = OPERATION([values[name] for name in part.inputs], block.number, kind, list(present), number)
    values |= zip(part.outputs, results, strict=True)


def _first(items: Sequence[Tensor], item: Tensor) -> int:
    return next(index for index, each in enumerate(items) if each is item)
