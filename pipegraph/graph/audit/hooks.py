"""Hooks that a model has when it is captured: those of a forward run while it is traced, and are in its graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from pipegraph.errors import CaptureError, path_from_here
from pipegraph.graph.internals import backward_hooks_of, hooks_of


def check_hooks(model: nn.Module) -> None:
    """Raise CaptureError if a parameter has a hook, or a module one for its backward: a stage would not call it."""
    for name, parameter in model.named_parameters():
        for hook in hooks_of(parameter):
            raise _not_called(f"the parameter {name} has a hook", hook, f'stage.get_parameter("{name}")')
    for name, module in model.named_modules():
        for hook in backward_hooks_of(module):
            place = f'stage.get_submodule("{name}")' if name else "the module that it is about"
            raise _not_called(f"{name or type(model).__name__} has a hook for its backward", hook, place)


def _not_called(what: str, hook: Callable[..., Any], place: str) -> CaptureError:
    line = _line_of(hook)
    return CaptureError(
        f"{what}, which a stage would not call.{f'{chr(10)}  at {line}' if line else ''}\n"
        f"Try: the model without it, and the hook on the stages: Pipeline(parallelize_fn=...) gives each one to a "
        f"function, which registers it on {place} where the stage has it."
    )


def _line_of(hook: Callable[..., Any]) -> str:
    function = inspect.unwrap(getattr(hook, "func", hook))
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return "" if code is None else f"{path_from_here(code.co_filename)}:{code.co_firstlineno}"
