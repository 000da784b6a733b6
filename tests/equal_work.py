"""Commands of one model begin with the same work: they capture it, and trace its blocks to price them.

Tests of what comes after share that work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipegraph.cost.segments import distinct_blocks
from pipegraph.cost.segments.distinct_blocks import BlockOptions
from pipegraph.cost.segments.subgraph import Subgraph
from pipegraph.graph import capture as module_of_capture
from pipegraph.graph.captured import Captured
from pipegraph.graph.model_structure import class_text, modules_of, state_of
from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.kernels.graphs.regions import Regions

_captures: dict[object, Captured] = {}
_traces: dict[object, DividedFunction] = {}


@contextmanager
def equal_work_shared() -> Iterator[None]:
    """Capture a model once of those that are built alike, by the same files, and trace equal blocks once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_of_capture, "_capture", _sharing_captures(module_of_capture._capture))
        patch.setattr(distinct_blocks, "_traced", _sharing_traces(distinct_blocks._traced))
        yield


@pytest.fixture(autouse=True)
def shared_work() -> Iterator[None]:
    """For the tests of a folder whose conftest.py imports it."""
    with equal_work_shared():
        yield


def _sharing_captures(original: Any) -> Any:
    """A model gets the graph of the one before, with its own weights and modules."""

    def capture(model: nn.Module, example: object, *arguments: object, **options: object) -> Captured:
        form = repr(pytree.tree_map_only(torch.Tensor, _form, example))
        key = _description(model), form, repr(arguments), repr(options)
        if key not in _captures:
            _captures[key] = original(model, example, *arguments, **options)
            return _captures[key]
        _, tensors = state_of(model)
        return replace(_captures[key], tensors=_captures[key].tensors | tensors, modules=modules_of(model))

    return capture


def _sharing_traces(original: Any) -> Any:
    def traced(subgraph: Subgraph, loss: Any, target: Any, tracing: BlockOptions, regions: Regions) -> DividedFunction:
        if tracing.loss is not None:
            return original(subgraph, loss, target, tracing, regions)
        outputs = subgraph.captured.outputs if subgraph.last else None
        key = subgraph.key, repr(outputs), tracing.gpu
        if key not in _traces:
            _traces[key] = original(subgraph, loss, target, tracing, regions)
            return _traces[key]
        return _traces[key].with_regions(regions)

    return traced


def _description(model: nn.Module) -> str:
    """The files of a model's classes, its modules and what they hold, and the form of its state."""
    classes = filter(None, (class_text(cls) for cls in {type(module) for module in model.modules()}))
    parts: list[object] = [(file, file.read_text()) for file in sorted({class_source.file for class_source in classes})]
    for name, module in model.named_modules(remove_duplicate=False):
        texts = (f"{key}={value!r}" for key, value in vars(module).items() if key not in ("_parameters", "_buffers"))
        parts.append((name, type(module).__qualname__, [text for text in texts if " at 0x" not in text]))
    state, tensors = state_of(model)  # on the meta device or not: that makes no difference to a capture
    parts.extend((state[name], tensor.stride()) for name, tensor in tensors.items())
    return repr(parts)


def _form(tensor: torch.Tensor) -> object:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type
