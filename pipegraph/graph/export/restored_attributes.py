"""Leave a model as it was, whatever its ``forward`` does to itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipegraph.graph.internals import version_of


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Undo what happens inside to the attributes of modules: a cache would be left with tensors without memory.

    Buffers are no fake tensors, because models read their values; their values (a batch norm counts its batches) are
    put back.
    """
    held = [container for module in model.modules() for container in _containers(vars(module))]
    before = [(container, type(container)(container)) for container in held]
    buffers = [(buffer, buffer.detach().clone(), version_of(buffer)) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values, version in buffers:
                if version_of(buffer) != version:
                    buffer.copy_(values)
        for container, contents in before:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)


def _containers(container: Any) -> Iterator[Any]:
    """A dict, list or set, and those inside it."""
    waiting, seen = [container], set[int]()
    while waiting:
        each = waiting.pop()
        if type(each) in (dict, list, set) and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting.extend(each.values() if isinstance(each, dict) else each)
