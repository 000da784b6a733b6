"""Which module of a stage is running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn


@contextmanager
def running_modules(stage: nn.Module) -> Iterator[list[str]]:
    """A context around a call of a stage, with the names of the modules that are running, the outermost first.

    After an error they are those in which it was raised.
    """
    names: list[str] = []

    def begins(name: str, module: nn.Module, args: Any) -> None:
        names.append(name)

    def ends(module: nn.Module, args: Any, output: Any) -> None:
        names.pop()

    handles = []
    for name, module in stage.named_modules():
        # Before the hooks of styles, which may refuse what the module takes.
        handles.append(module.register_forward_pre_hook(partial(begins, name), prepend=True))
        handles.append(module.register_forward_hook(ends))
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


def failed_in(names: list[str]) -> str:
    """``, in layers.0.mlp.down`` for the innermost of them; empty if it is the stage itself."""
    return f", in {names[-1]}" if names and names[-1] else ""
