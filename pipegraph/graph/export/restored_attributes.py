"""Leave a model as it was, whatever its ``forward`` does to itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from pipegraph.graph.internals import version_of


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Undo what happens inside to the attributes of modules: a cache would be left with tensors without memory.

    Tensors that are attributes get their values back. Parameters and buffers do not: ``torch.export`` and
    `fake_parameters` put tensors without memory in their place.
    """
    held = [container for module in model.modules() for container in _containers(vars(module))]
    before = [(container, type(container)(container)) for container in held]
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    tensors = {id(tensor): tensor for container in held for tensor in _tensors(container) if id(tensor) not in own}
    try:
        with _values_restored(tensors.values()):
            yield
    finally:
        for container, contents in before:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)


def buffers_restored(model: nn.Module) -> AbstractContextManager[None]:
    """Undo what a run of the model inside writes into its buffers: a batch norm counts its batches.

    Buffers are no fake tensors then, because models read their values.
    """
    return _values_restored(model.buffers())


@contextmanager
def _values_restored(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    # A tensor that was made in inference mode is not written outside of it.
    before = [(each, each.detach().clone(), version_of(each)) for each in tensors if not each.is_inference()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values, version in before:
                if version_of(tensor) != version:
                    tensor.copy_(values)


def _containers(container: Any) -> Iterator[Any]:
    """A dict, list or set, and those inside it; a module's hooks are in ordered dicts."""
    waiting, seen = [container], set[int]()
    while waiting:
        each = waiting.pop()
        if type(each) in (dict, OrderedDict, list, set) and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting.extend(each.values() if isinstance(each, dict) else each)


def _tensors(container: Any) -> list[torch.Tensor]:
    values = container.values() if isinstance(container, dict) else container
    return [each for each in values if isinstance(each, torch.Tensor)]
