"""Models of tests/models and examples, each captured once for each process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import pipegraph
from pipegraph.graph import capture as module_of_capture
from pipegraph.graph.captured import Captured
from pipegraph.graph.class_text import class_text
from pipegraph.graph.model_structure import modules_of, state_of
from pipegraph.graph.sources.load import load

ROOT = Path(__file__).parents[1]

# What `equal_captures_shared` made, by the description of the model and the form of its inputs.
_MADE: dict[object, Captured] = {}


@cache
def captured(model: str, weights: bool = False) -> Captured:
    """What ``pipegraph.capture`` makes of a model, as the command line takes it: ``tests/models/t5.py``.

    Those who get it do not change it. Without ``weights`` the parameters are on the meta device.
    """
    name, folder = model.removeprefix("hf:"), "hf:" if model.startswith("hf:") else ""
    source = load(f"{folder}{ROOT / name}", weights=weights)
    return pipegraph.capture(source.model, source.args, source.kwargs)


@contextmanager
def equal_captures_shared() -> Iterator[None]:
    """Capture a model once of those that are built alike, by the same files, for commands that begin with a capture.

    A model gets the graph of the one before, with its own weights and modules.
    """
    own = module_of_capture._capture

    def capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], allow_derivative: bool) -> Captured:
        key = (description(model), repr(pytree.tree_map_only(torch.Tensor, tensor_form, (args, kwargs))))
        if key not in _MADE:
            _MADE[key] = own(model, args, kwargs, allow_derivative)
            return _MADE[key]
        _, tensors = state_of(model)
        return replace(_MADE[key], tensors=_MADE[key].tensors | tensors, modules=modules_of(model))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_of_capture, "_capture", capture)
        yield


def description(model: nn.Module) -> str:
    """The files of a model's classes, its modules and what they hold, and the form of its state."""
    classes = filter(None, (class_text(cls) for cls in {type(module) for module in model.modules()}))
    parts: list[object] = [(file, file.read_text()) for file in sorted({each.file for each in classes})]
    for name, module in model.named_modules(remove_duplicate=False):
        held = (f"{key}={value!r}" for key, value in vars(module).items() if key not in ("_parameters", "_buffers"))
        parts.append((name, type(module).__qualname__, [text for text in held if " at 0x" not in text]))
    state, tensors = state_of(model)
    parts.extend((state[name], tensor_form(tensor)) for name, tensor in tensors.items())
    return repr(parts)


def tensor_form(tensor: torch.Tensor) -> object:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type
