"""A function of tensors, and the blocks that it calls, differentiated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.kernels.blocks.repeated_modules import DEVICES, RecordedCall, RepeatedModules
from pipegraph.kernels.graphs import joint_graph
from pipegraph.kernels.modules.module_state import ModuleState
from pipegraph.kernels.sharded import local


@dataclass(frozen=True)
class TraceOptions:
    """How graphs are made: `recompute` as in `make.RECOMPUTE`, `decompositions` gives those of operations.

    `blocks` are those that were made so. No signature tells what a module reads of its class or of globals, so that
    they are not for other stages than those that are made with one another.
    """

    recompute: str
    decompositions: Callable[[], Mapping[Any, Any]]
    blocks: weakref.WeakValueDictionary[Any, DividedFunction] = field(default_factory=weakref.WeakValueDictionary)


def differentiate(
    function: joint_graph.Function,
    state: ModuleState,
    primals: Sequence[Tensor],
    root: nn.Module,
    comes: Callable[[int, Tensor], bool],
    options: TraceOptions,
) -> DividedFunction:
    """The derivative of `function`, which calls modules inside `root`.

    Primals are fake; the first ones stand in the place of `state`, and the others are inputs. `comes` says of an
    output that can have a gradient whether one will come. In the caller's modes.
    """
    blocks = RepeatedModules(root)
    given = [_anew(primal) for primal in primals]
    with blocks.recording(), state.replaced(given[: len(state)]):
        outputs = function(given)
    while waiting := [record for record in blocks.outermost() if record.block is None]:
        for record in waiting:
            try:
                record.block = block_of(record, options)
            except Exception:  # it may be traced as a part of what is around it, and the blocks in it by themselves
                record.refused = True
    tangents = [
        torch.empty_like(output, requires_grad=False)  # with the output's strides, unless its elements overlap
        if output.requires_grad and comes(index, output)
        else None
        for index, output in enumerate(outputs)
    ]
    with blocks.calling():
        given = [_anew(primal) for primal in primals]
        traced = joint_graph.trace(function, state, given, tangents, options.decompositions())
    called = [record.block for record in blocks.records.values() if record.block is not None]
    is_input = [index >= len(state) for index in range(len(primals))]
    return DividedFunction(traced, is_input, options.recompute, called)


def block_of(record: RecordedCall, options: TraceOptions) -> DividedFunction:
    """The derivative of a block, one for all stages of these options. Raises whatever tracing it does."""
    found = options.blocks.get(record.signature)
    if found is None:
        found = options.blocks[record.signature] = _block(record, options)
    return found


def _block(record: RecordedCall, options: TraceOptions) -> DividedFunction:
    state = ModuleState(record.module.modules())
    tensors = [leaf for leaf in record.leaves if isinstance(leaf, Tensor)]

    def function(primals: Sequence[Tensor]) -> list[Tensor]:
        given = iter(primals[len(state) :])
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in record.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, record.spec)
        returned = pytree.tree_leaves(record.original(*args, **kwargs))
        return [each for each, result in zip(returned, record.results, strict=True) if isinstance(result, Tensor)]

    primals = [*record.state, *tensors]
    with _modes(record):
        return differentiate(function, state, primals, record.module, lambda index, output: True, options)


def _anew(tensor: Tensor) -> Tensor:
    own = local(tensor)
    made = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device)
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def _modes(record: RecordedCall) -> Iterator[None]:
    """The modes that the call was made in."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(record.grad))
        for device, (enabled, dtype) in zip(DEVICES, record.autocast, strict=True):
            if (enabled, dtype) != (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)):
                stack.enter_context(torch.autocast(device, dtype, enabled))
        yield
