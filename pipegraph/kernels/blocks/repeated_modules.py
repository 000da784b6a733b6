"""Calls of equal modules, which are traced and compiled once: blocks, and the sizes of their calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.kernels.autocast import AutocastState, autocast_state
from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.kernels.graphs.regions import ModuleRegions, placed
from pipegraph.kernels.random_operations import RandomOps
from pipegraph.kernels.sharded import differentiable_local, is_sharded, local
from pipegraph.kernels.symbolic_sizes import contiguous_strides, dimensions
from pipegraph.kernels.trace_guard import ModuleState, module_signature, tensor_kind, tensor_signature, value_signature
from pipegraph.recompute import Region
from pipegraph.torch_private.pytrees import tree_flatten, tree_unflatten
from pipegraph.torch_private.symbolic_shapes import evaluate, expression, is_symbolic, placeholder_symbol
from pipegraph.torch_private.tensors import storage_identity
from pipegraph.torch_private.tensors import version_of as version

_CONSTANTS = (type(None), bool, int, float, str)


@dataclass
class RecordedCall:
    """The first call with its signature. All tensors here are fake tensors.

    Attributes:
        module, original: the module and its own forward.
        signature: equal for calls that run the same code, whatever their sizes are called.
        sizes: the sizes of its arguments.
        state: the module's parameters and buffers.
        leaves, spec: the flattened arguments.
        regions: what its backward computes again, in the modules inside.
        inside: the call around this one.
        within: the number of calls with this signature in each region around their modules; None for no region.
        results, results_spec: the flattened result: the position of an argument, a tensor, or a constant in a tuple.
        grad_enabled, autocast: the modes of the call.
        is_refused: it cannot be a block.
        draws: the number of keys of random numbers that it takes.
        block: its graphs, once traced.
    """

    module: nn.Module
    original: Callable[..., Any]
    signature: Any
    sizes: BlockSizes
    state: list[Tensor]
    leaves: list[Any]
    spec: Any
    regions: ModuleRegions
    inside: RecordedCall | None
    within: Counter[Region | None]
    results: list[int | Tensor | tuple[Any]] = field(default_factory=list)
    results_spec: Any = None
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)
    autocast: AutocastState = field(default_factory=autocast_state)
    is_refused: bool = False
    draws: int = 0
    block: DividedFunction | None = None

    @property
    def family(self) -> Any:
        """Equal for calls that differ in sizes alone."""
        return self.signature[0]

    @property
    def is_block(self) -> bool:
        """Whether it is called several times in a region, or outside of all. A region with one call is computed again
        as a whole, which it could not be with a block in it."""
        return max(self.within.values()) > 1 and not self.is_refused

    @property
    def is_outermost(self) -> bool:
        """Whether no block contains it."""
        around = self.inside
        while around is not None and not around.is_block:
            around = around.inside
        return around is None

    def set_results(self, returned: Any) -> None:
        """Record what the call returned, and refuse what the call of a block could not return."""
        results, self.results_spec = tree_flatten(returned)
        if any(isinstance(leaf, Tensor) and is_sharded(leaf) for leaf in (*self.leaves, *results)):
            self.is_refused = True  # only local tensors enter and leave the call of a block
            return
        storages = {storage_identity(local(leaf)) for leaf in (*self.leaves, *self.state) if isinstance(leaf, Tensor)}
        for result in results:
            position = next((index for index, leaf in enumerate(self.leaves) if leaf is result), None)
            if not isinstance(result, Tensor):
                self.results.append((result,))
                self.is_refused |= not isinstance(result, _CONSTANTS)
            elif position is not None:
                self.results.append(position)
            else:
                # A view of an argument, or of another result, would no longer be a view.
                self.is_refused |= storage_identity(result) in storages
                storages.add(storage_identity(result))
                self.results.append(result)

    def result(self, leaves: Sequence[Any], tensors: Iterator[Tensor]) -> Any:
        """Put a result together from the arguments of an equal call and from new tensors."""
        return tree_unflatten(
            [
                leaves[slot] if isinstance(slot, int) else next(tensors) if isinstance(slot, Tensor) else slot[0]
                for slot in self.results
            ],
            self.results_spec,
        )


class RepeatedModules:
    """Finds and calls the blocks among the modules inside `root`.

    Attributes:
        records: the first call with each signature and sizes.
    """

    def __init__(self, root: nn.Module, regions: ModuleRegions) -> None:
        """``regions`` are those of the modules inside."""
        self._root = root
        named = {module: name for name, module in root.named_modules() if module is not root}
        self._modules = [module for module in named if _may_be_block(module)]
        self._regions = {module: regions.within(named[module]) for module in self._modules}
        self._placed = {root.get_submodule(name): regions.region_of(name) for name in regions.names}
        self._region_around = {module: regions.around(named[module]) for module in self._modules}
        self._states = {module: ModuleState(module.modules()) for module in self._modules}
        self._signatures = {module: module_signature(module) for module in self._modules}
        self.records: dict[Any, RecordedCall] = {}
        self._around: RecordedCall | None = None
        self._calls = 0
        self._draws: RandomOps | None = None
        self._keys: Tensor | None = None

    def outermost(self) -> list[RecordedCall]:
        """Return the blocks to trace."""
        return [record for record in self.records.values() if record.is_block and record.is_outermost]

    @property
    def draw_modules(self) -> tuple[str, ...]:
        """The names of the modules of all draws of the function, in order; none if they have no keys."""
        return () if self._draws is None else tuple(self._draws.modules)

    @contextmanager
    def recording(self, draws: RandomOps | None) -> Iterator[None]:
        """Record the calls of modules, and the draws in them, while the function runs the first time."""
        self._draws = draws
        with self._with_forwards(self._record, self._modules), nullcontext() if draws is None else draws.replacing():
            yield

    def with_keys(self, function: Callable[..., Any], outside: str) -> Callable[..., Any]:
        """Return the function with one more argument, the last: the keys of its draws. A block takes its own keys."""

        def seeded(primals: Sequence[Tensor]) -> Any:
            *tensors, keys = primals
            self._keys = keys
            self._draws = RandomOps(self._root, outside, key=lambda position: keys[position])
            with self._draws.replacing():
                return function(tensors)

        return seeded

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Call blocks as operations while the function is traced, and mark all others with their regions."""
        self._calls = 0
        with self._with_forwards(self._mark, [*self._placed]), self._with_forwards(self._call, self._modules):
            yield

    @contextmanager
    def _with_forwards(self, called: Callable[..., Any], modules: Sequence[nn.Module]) -> Iterator[None]:
        forwards = [(module, vars(module).get("forward")) for module in modules]
        for module in modules:
            module.forward = partial(called, module, module.forward)
        try:
            yield
        finally:
            for module, forward in forwards:
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward

    def _signature(self, module: nn.Module, leaves: Sequence[Any], spec: Any) -> tuple[Any, BlockSizes]:
        sizes = BlockSizes.from_leaves([local(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        kinds = tuple(
            tensor_kind(leaf) if isinstance(leaf, Tensor) else None if _is_whole(leaf) else value_signature(leaf)
            for leaf in leaves
        )
        aliases = tuple(next(i for i, other_leaf in enumerate(leaves) if other_leaf is leaf) for leaf in leaves)
        state = tuple(map(tensor_signature, self._states[module].tensors()))
        modes = torch.is_grad_enabled(), autocast_state()
        numbers = tuple(leaf for leaf in leaves if type(leaf) is int)
        family = (self._signatures[module], self._regions[module].signature, state, kinds, aliases, spec, modes)
        return (family, sizes.layouts, numbers), sizes

    def _record(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        signature, sizes = self._signature(module, leaves, spec)
        key = signature, dimensions(sizes.values)
        record = self.records.get(key)
        if record is not None:
            record.within[self._region_around[module]] += 1
            if not record.is_block:
                return original(*args, **kwargs)
            if self._draws is not None:
                self._draws.take([""] * record.draws)
            return record.result(leaves, iter([_like(slot) for slot in record.results if isinstance(slot, Tensor)]))
        state, regions = self._states[module].tensors(), self._regions[module]
        within = Counter([self._region_around[module]])
        record = RecordedCall(module, original, signature, sizes, state, leaves, spec, regions, self._around, within)
        self.records[key] = record
        versions = [version(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        previous_draws = len(self.draw_modules)
        self._around = record
        try:
            returned = original(*args, **kwargs)
        finally:
            self._around = record.inside
        record.set_results(returned)
        record.draws = len(self.draw_modules) - previous_draws
        record.is_refused |= versions != [version(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        return returned

    def _mark(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with placed(self._placed[module]):
            return original(*args, **kwargs)

    def _call(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        signature, sizes = self._signature(module, leaves, spec)
        record = self.records.get((signature, dimensions(sizes.values)))
        if record is None or record.block is None or record.is_refused:
            return original(*args, **kwargs)
        self._calls += 1
        state = map(differentiable_local, self._states[module].tensors())
        tensors = [*state, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        if record.block.draws:
            assert self._draws is not None and self._keys is not None
            tensors.append(self._keys[self._draws.take(record.block.draws)])
        results = record.block.call(self._calls, tensors, sizes.values)
        written = record.block.joint.written
        with torch.no_grad():
            for index, value in zip(written, results[len(results) - len(written) :], strict=True):
                tensors[index].copy_(value)
        return record.result(leaves, iter(results))


def _may_be_block(module: nn.Module) -> bool:
    """Whether a module holds others and computes with parameters. A lone layer is better fused with its neighbours."""
    is_called = type(module).forward is not nn.Module.forward
    return is_called and any(True for _ in module.children()) and any(True for _ in module.parameters())


def _is_whole(value: Any) -> bool:
    """Whether a value may be a size: a whole number, or a symbol for one."""
    return type(value) is int or is_symbolic(value)


def _like(tensor: Tensor) -> Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    # No leaf: the original may be written to, and so may this.
    return copy.requires_grad_().clone(memory_format=torch.preserve_format) if tensor.requires_grad else copy


@dataclass(frozen=True)
class TensorLayout:
    """Sizes and strides of a tensor: numbers, and expressions of the symbols that stand for the block's sizes."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of a call's arguments.

    Two calls with equal layouts run the same code, whatever their sizes: the caller's `seq // 2` is as good as `seq`.

    Attributes:
        layouts: for each argument, its `TensorLayout`, the symbol of a size, or None if it is not a tensor or a size.
        symbols: the symbols of the block's sizes in the layouts.
        values: the values of the sizes in the caller.
    """

    layouts: tuple[Any, ...]
    symbols: tuple[Any, ...]
    values: tuple[Any, ...]

    @classmethod
    def from_leaves(cls, leaves: Sequence[Any]) -> BlockSizes:
        """Return those of the flattened arguments."""
        names = _Names()
        shapes = [names.of_all(leaf.shape) if isinstance(leaf, Tensor) else names.symbol_of(leaf) for leaf in leaves]
        layouts = [
            TensorLayout(shape, names.strides(leaf, shape))
            if isinstance(leaf, Tensor)
            else shape
            if is_symbolic(leaf)
            else None
            for leaf, shape in zip(leaves, shapes, strict=True)
        ]
        return cls(tuple(layouts), tuple(names.symbols.values()), tuple(names.values))

    def at(self, layout: Any, values: Sequence[Any]) -> Any:
        """Return a layout, or a size, with other values for the block's sizes."""
        sizes = dict(zip(self.symbols, values, strict=True))
        if not isinstance(layout, TensorLayout):
            return evaluate(layout, sizes)
        shape, strides = ([evaluate(size, sizes) for size in part] for part in (layout.shape, layout.strides))
        return TensorLayout(tuple(shape), tuple(strides))


class _Names:
    """A symbol for each distinct expression among the caller's sizes."""

    def __init__(self) -> None:
        self.symbols: dict[Any, Any] = {}
        self.values: list[Any] = []

    def symbol_of(self, value: Any) -> Any:
        size_expression = expression(value)
        if not is_symbolic(value) or isinstance(size_expression, int):
            return size_expression
        if size_expression not in self.symbols:
            self.symbols[size_expression] = placeholder_symbol(len(self.values))
            self.values.append(value)
        return self.symbols[size_expression]

    def of_all(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(map(self.symbol_of, values))

    def strides(self, tensor: Tensor, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """The strides as expressions of the sizes' symbols. A stride that does not follow from them is a symbol."""
        if dimensions(contiguous_strides(tensor.shape)) == dimensions(tensor.stride()):
            return contiguous_strides(shape)
        return tuple(map(self._stride, tensor.stride()))

    def _stride(self, value: Any) -> Any:
        size_expression = expression(value)
        if isinstance(size_expression, int):
            return size_expression
        renamed = size_expression.xreplace(self.symbols)
        return renamed if renamed.free_symbols <= {*self.symbols.values()} else self.symbol_of(value)
