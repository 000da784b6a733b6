"""A function of tensors, and the blocks that it calls, differentiated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipegraph.kernels import joint
from pipegraph.kernels.blocks import DEVICES, Blocks, Record
from pipegraph.kernels.derivative import Derivative
from pipegraph.kernels.sharded import local
from pipegraph.kernels.state import State

_known: weakref.WeakValueDictionary[Any, Derivative] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Options:
    """How graphs are made: `recompute` as in `divide.RECOMPUTE`, `decompositions` gives those of operations."""

    recompute: str
    decompositions: Callable[[], Mapping[Any, Any] | None]


def differentiate(
    function: joint.Function,
    primals: Sequence[Tensor],
    root: nn.Module,
    is_input: Sequence[bool],
    comes: Callable[[int, Tensor], bool],
    options: Options,
) -> Derivative:
    """The derivative of `function`, which calls modules inside `root`.

    Primals are fake. `comes` says of an output that can have a gradient whether one will come. In the caller's modes.
    """
    blocks = Blocks(root)
    with blocks.recording():
        outputs = function([_anew(primal) for primal in primals])
    for record in blocks.outermost():
        record.block = block_of(record, options)
    tangents = [
        torch.empty_like(output, requires_grad=False)  # with the output's strides, unless its elements overlap
        if output.requires_grad and comes(index, output)
        else None
        for index, output in enumerate(outputs)
    ]
    with blocks.calling():
        traced = joint.trace(function, [_anew(primal) for primal in primals], tangents, options.decompositions())
    called = [record.block for record in blocks.records.values() if record.block is not None]
    return Derivative(traced, is_input, options.recompute, called)


def block_of(record: Record, options: Options) -> Derivative | None:
    """The derivative of a block, which all stages of this process share; None where it cannot be traced by itself."""
    key = record.signature, options
    found = _known.get(key)
    if found is None:
        found = _block(record, options)
        _known[key] = found
    return found


def _block(record: Record, options: Options) -> Derivative:
    state = State(record.module)
    tensors = [leaf for leaf in record.leaves if isinstance(leaf, Tensor)]

    def function(primals: Sequence[Tensor]) -> list[Tensor]:
        given = iter(primals[len(state) :])
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in record.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, record.spec)
        with state.replaced(primals[: len(state)]):
            returned = pytree.tree_leaves(record.original(*args, **kwargs))
        return [each for each, result in zip(returned, record.results, strict=True) if isinstance(result, Tensor)]

    is_input = [*[False] * len(state), *[True] * len(tensors)]
    with _modes(record):
        return differentiate(
            function, [*record.state, *tensors], record.module, is_input, lambda index, output: True, options
        )


def _anew(tensor: Tensor) -> Tensor:
    own = local(tensor)
    made = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device)
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def _modes(record: Record) -> Iterator[None]:
    """The modes that the call was made in."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(record.grad))
        for device, (enabled, dtype) in zip(DEVICES, record.autocast, strict=True):
            if (enabled, dtype) != (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)):
                stack.enter_context(torch.autocast(device, dtype, enabled))
        yield
