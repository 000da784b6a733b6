"""Calls of equal modules, which are traced and compiled once.

A function is run twice on tensors without memory. The first run records the calls of its modules: those whose
signature comes again are blocks, the outermost ones. In the second run, which is traced, each call of a block is one
operation. Whatever stands between the blocks, or in modules called once, belongs to the function's own graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.kernels.modules.module_state import ModuleState
from pipegraph.kernels.modules.signature import module_signature, tensor_signature, value_signature
from pipegraph.kernels.sharded import differentiable_local, is_sharded, local


@dataclass
class RecordedCall:
    """The first call of its signature: of `module`, whose own forward is `original`.

    `state` are the module's tensors, `leaves` its arguments flattened, `results` what it returned: the position of an
    argument, a tensor, or a constant. No tensor of them has memory.
    """

    module: nn.Module
    original: Callable[..., Any]
    signature: Any
    state: list[Tensor]
    leaves: list[Any]
    spec: Any
    inside: RecordedCall | None
    count: int = 1
    results: list[int | Tensor | tuple[Any]] = field(default_factory=list)
    results_spec: Any = None
    grad: bool = field(default_factory=torch.is_grad_enabled)
    autocast: Any = field(default_factory=lambda: autocast_state())
    refused: bool = False
    block: DividedFunction | None = None

    @property
    def is_block(self) -> bool:
        return self.count > 1 and not self.refused

    @property
    def is_outermost(self) -> bool:
        """Whether no block that is called holds it."""
        around = self.inside
        while around is not None and not around.is_block:
            around = around.inside
        return around is None


class RepeatedModules:
    """The blocks among the modules inside `root`."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = [module for module in root.modules() if module is not root and _may_be_block(module)]
        self._states = {module: ModuleState(module.modules()) for module in self._modules}
        self._signatures = {module: module_signature(module) for module in self._modules}
        self.records: dict[Any, RecordedCall] = {}
        self._around: RecordedCall | None = None
        self._calls = 0

    def __bool__(self) -> bool:
        return bool(self._modules)

    def outermost(self) -> list[RecordedCall]:
        """The blocks to trace."""
        return [record for record in self.records.values() if record.is_block and record.is_outermost]

    def recording(self) -> Any:
        """While the function is run the first time."""
        return self._patched(self._record)

    def calling(self) -> Any:
        """While it is traced."""
        self._calls = 0
        return self._patched(self._call)

    @contextmanager
    def _patched(self, called: Callable[..., Any]) -> Iterator[None]:
        own = [(module, vars(module).get("forward")) for module in self._modules]
        for module in self._modules:
            module.forward = partial(called, module, module.forward)
        try:
            yield
        finally:
            for module, before in own:
                if before is None:
                    del module.forward
                else:
                    module.forward = before

    def _signature(self, module: nn.Module, leaves: Sequence[Any], spec: Any) -> Any:
        given = tuple(tensor_signature(leaf) if isinstance(leaf, Tensor) else value_signature(leaf) for leaf in leaves)
        same = tuple(next(i for i, other in enumerate(leaves) if other is leaf) for leaf in leaves)
        state = tuple(map(tensor_signature, self._states[module].tensors()))
        return (self._signatures[module], state, given, same, spec, torch.is_grad_enabled(), autocast_state())

    def _record(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        signature = self._signature(module, leaves, spec)
        record = self.records.get(signature)
        if record is not None and not record.refused:
            record.count += 1
            return _made_up(record, leaves)
        if record is not None:
            return original(*args, **kwargs)
        state = self._states[module].tensors()
        record = RecordedCall(module, original, signature, state, leaves, spec, self._around)
        self.records[signature] = record
        versions = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
        self._around = record
        try:
            returned = original(*args, **kwargs)
        finally:
            self._around = record.inside
        _describe(record, returned, [*leaves, *map(local, state)])
        record.refused |= versions != [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
        return returned

    def _call(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        record = self.records.get(self._signature(module, leaves, spec))
        if record is None or record.block is None or record.refused:
            return original(*args, **kwargs)
        self._calls += 1
        state = map(differentiable_local, self._states[module].tensors())
        tensors = [*state, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        found = list(record.block.call(self._calls, tensors))
        written = record.block.joint.written
        with torch.no_grad():
            for index, new in zip(written, found[len(found) - len(written) :], strict=True):
                tensors[index].copy_(new)
        given = iter(found)
        return pytree.tree_unflatten([_returned(each, leaves, given) for each in record.results], record.results_spec)


DEVICES = ("cpu", "cuda")


def autocast_state() -> Any:
    """What a graph takes from the regions of autocast around it."""
    return tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES)


def _may_be_block(module: nn.Module) -> bool:
    """One that holds others and computes with parameters. A lone layer is better fused with what stands beside it."""
    called = type(module).forward is not nn.Module.forward
    return called and any(True for _ in module.children()) and any(True for _ in module.parameters())


def _describe(record: RecordedCall, returned: Any, given: Sequence[Any]) -> None:
    leaves, record.results_spec = pytree.tree_flatten(returned)
    if any(isinstance(each, Tensor) and is_sharded(each) for each in (*record.leaves, *leaves)):
        record.refused = True  # only local tensors go in and out of the call of a block
        return
    memory = {each.untyped_storage()._cdata for each in given if isinstance(each, Tensor)}
    for leaf in leaves:
        position = next((index for index, each in enumerate(record.leaves) if each is leaf), None)
        if not isinstance(leaf, Tensor):
            record.results.append((leaf,))
        elif position is not None:
            record.results.append(position)
        else:
            # A view of what came in, or of another output, would no longer be one.
            record.refused |= leaf.untyped_storage()._cdata in memory
            memory.add(leaf.untyped_storage()._cdata)
            record.results.append(leaf)
    constants = (each[0] for each in record.results if isinstance(each, tuple))
    record.refused |= not all(isinstance(each, (type(None), bool, int, float, str)) for each in constants)


def _made_up(record: RecordedCall, leaves: Sequence[Any]) -> Any:
    """What a call that equals an earlier one would return, without memory."""
    made = iter([_like(each) for each in record.results if isinstance(each, Tensor)])
    return pytree.tree_unflatten([_returned(each, leaves, made) for each in record.results], record.results_spec)


def _like(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    # No leaf, so that it may be written to as what it stands for.
    return made.requires_grad_().clone(memory_format=torch.preserve_format) if tensor.requires_grad else made


def _returned(result: int | Tensor | tuple[Any], leaves: Sequence[Any], tensors: Iterator[Tensor]) -> Any:
    if isinstance(result, int):
        return leaves[result]
    return next(tensors) if isinstance(result, Tensor) else result[0]
