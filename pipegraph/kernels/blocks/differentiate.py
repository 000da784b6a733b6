"""A function of tensors, and the blocks that it calls, differentiated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.kernels.autocast import autocast_as
from pipegraph.kernels.blocks.divided_function import DividedFunction, reason_of
from pipegraph.kernels.blocks.repeated_modules import RecordedCall, RepeatedModules, TensorLayout
from pipegraph.kernels.graphs import joint_graph
from pipegraph.kernels.graphs.regions import ModuleRegions, Regions
from pipegraph.kernels.random_operations import RandomOps
from pipegraph.kernels.sharded import local
from pipegraph.kernels.symbolic_sizes import SymbolicSizes, dimensions
from pipegraph.kernels.trace_guard import ModuleState
from pipegraph.recompute import Recompute
from pipegraph.torch_private.fake_tensors import fake_tensors
from pipegraph.torch_private.pytrees import tree_leaves, tree_unflatten
from pipegraph.torch_private.symbolic_shapes import is_symbolic, number_of
from pipegraph.torch_private.tracing import python_dispatch, unprofiled


@dataclass(frozen=True)
class TraceOptions:
    """Options of tracing and division.

    Attributes:
        recompute: what backwards compute again: choices by names of modules, or the regions of a function whose
            operations have places of their own.
        decompositions: returns those of operations.
        is_seeded: whether random operations are functions of keys, as in `random/draws.py`.
        blocks: the blocks made with these options, by signature. A signature says nothing of what a module reads from
            its class or from globals, so only the stages of one pipeline share blocks.
    """

    recompute: Recompute | Regions
    decompositions: Callable[[], Mapping[Any, Any]]
    is_seeded: bool = False
    blocks: weakref.WeakValueDictionary[Any, DividedFunction] = field(default_factory=weakref.WeakValueDictionary)


def differentiate(
    function: joint_graph.Function,
    state: ModuleState,
    primals: Sequence[Tensor],
    root: nn.Module,
    has_gradient: Callable[[int, Tensor], bool],
    options: TraceOptions,
    sizes: SymbolicSizes,
    regions: ModuleRegions,
    outside: str = "",
) -> DividedFunction:
    """Differentiate and divide a function, in the caller's grad mode and autocast.

    Args:
        function: calls modules inside `root`.
        state: the tensors that the first primals replace. The other primals are inputs.
        primals: fake tensors.
        root: its inner modules may be blocks.
        has_gradient: of an output that requires one (its position, the output), whether a gradient arrives.
        options: how graphs are made.
        sizes: the symbols in the shapes of the primals.
        regions: of the modules inside `root`.
        outside: the name of a draw outside all modules.

    Raises:
        Exception: whatever the function raises on fake tensors.
    """
    draws = None
    expressions: Any = None
    while expressions != (now := dimensions(sizes.values)):  # two symbols may turn out to be one
        expressions, blocks = now, RepeatedModules(root, regions)
        leaves = [_new_leaf(primal) for primal in primals]
        draws = RandomOps(root, outside) if options.is_seeded else None
        with python_dispatch(), blocks.recording(draws), state.replaced(leaves[: len(state)]):
            outputs = function(leaves)
    inlined: dict[str, str] = {}
    while waiting := [record for record in blocks.outermost() if record.block is None]:
        for record in waiting:
            try:
                record.block = block_of(record, options)
            except Exception as error:  # then it is traced as a part of its caller, and the blocks in it by themselves
                record.is_refused = True
                inlined[type(record.module).__name__] = reason_of(error)
    tangents = [
        torch.empty_like(output, requires_grad=False)  # with the output's strides, unless its elements overlap
        if output.requires_grad and has_gradient(index, output)
        else None
        for index, output in enumerate(outputs)
    ]
    leaves = [_new_leaf(primal) for primal in primals]
    if draws is not None and draws.modules:
        leaves.append(torch.empty(len(draws.modules), dtype=torch.int64, device=draws.device))
        function = blocks.with_keys(function, outside)
    with blocks.calling():
        joint = joint_graph.trace(function, state, leaves, tangents, options.decompositions(), sizes)
    called = [record.block for record in blocks.records.values() if record.block is not None]
    is_input = [index >= len(state) for index in range(len(leaves))]
    graph_regions = options.recompute if isinstance(options.recompute, Regions) else regions.of_graph
    name = type(root).__name__
    with unprofiled():
        return DividedFunction(name, joint, is_input, graph_regions, called, inlined, blocks.draw_modules)


def block_of(record: RecordedCall, options: TraceOptions) -> DividedFunction:
    """Return the block of a call, one for all stages that share the options. Raises whatever tracing raises."""
    block = options.blocks.get(record.signature)
    if block is None or not block.hold(tuple(map(number_of, record.sizes.values))):
        block = options.blocks[record.signature] = _differentiate_call(record, options)
        block.family = record.family
    return block


def _differentiate_call(record: RecordedCall, options: TraceOptions) -> DividedFunction:
    state = ModuleState(record.module.modules())
    sizes = SymbolicSizes([number_of(value) for value in record.sizes.values])
    layouts = [record.sizes.at(layout, sizes.values) for layout in record.sizes.layouts]

    def function(primals: Sequence[Tensor]) -> list[Tensor]:
        inputs = iter(primals[len(state) :])
        leaves = [
            next(inputs) if isinstance(leaf, Tensor) else layout if is_symbolic(leaf) else leaf
            for leaf, layout in zip(record.leaves, layouts, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, record.spec)
        returned = tree_leaves(record.original(*args, **kwargs))
        return [output for output, result in zip(returned, record.results, strict=True) if isinstance(result, Tensor)]

    with ExitStack() as stack:
        if sizes:  # with an environment of their own
            stack.enter_context(fake_tensors(sizes.environment))
        stack.enter_context(torch.set_grad_enabled(record.grad_enabled))
        stack.enter_context(autocast_as(record.autocast))
        primals = [
            *record.state,
            *(
                _laid_out(leaf, layout)
                for leaf, layout in zip(record.leaves, layouts, strict=True)
                if isinstance(leaf, Tensor)
            ),
        ]
        return differentiate(
            function, state, primals, record.module, lambda index, output: True, options, sizes, record.regions
        )


def _laid_out(tensor: Tensor, layout: TensorLayout) -> Tensor:
    """A fake tensor of this layout."""
    like = torch.empty_strided(layout.shape, layout.strides, dtype=tensor.dtype, device=tensor.device)
    return like.requires_grad_(tensor.requires_grad)


def _new_leaf(tensor: Tensor) -> Tensor:
    shard = local(tensor)
    leaf = torch.empty_strided(shard.shape, shard.stride(), dtype=shard.dtype, device=shard.device)
    return leaf.requires_grad_(tensor.requires_grad)
