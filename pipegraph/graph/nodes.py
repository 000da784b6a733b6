"""What a node of a captured graph says: its path, its source line, its arguments by name."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

_FRAME = re.compile(r'File "(.*)", line (\d+), in ')


def label_of(node: fx.Node) -> str:
    """The name of a node in ``Captured.args``, ``kwargs`` and ``outputs``: that of the model's argument for an input
    (the node's own name may differ, where the argument is called ``torch``)."""
    return str(node.target) if node.op == "placeholder" else node.name


def on_meta(node: fx.Node) -> Any:
    """An empty stand-in on the meta device for a value (or for the tensors of a tuple), to try an operation on."""

    def empty(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return pytree.tree_map_only(torch.Tensor, empty, node.meta.get("val"))


def source_line(node: fx.Node) -> str:
    """``model.py:12: h = h.nonzero()``: the line of the model's source that ran an operation; empty if unknown."""
    return innermost_line(str(node.meta.get("stack_trace") or ""))


def innermost_line(stack_trace: str) -> str:
    """The innermost frame of a trace as ``file:line: text``."""
    lines = [line.strip() for line in stack_trace.splitlines() if line.strip()]
    frames = [(position, match) for position, line in enumerate(lines) if (match := _FRAME.match(line))]
    if not frames:
        return ""
    position, match = frames[-1]
    return f"{match[1]}:{match[2]}: {' '.join(lines[position + 1 :])}"


def path_of(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """The module calls that ``node`` ran in, outermost first, the model itself left out: (call, FQN)."""
    return node.meta.get("path", ())


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """name in the operation's schema → what the graph hands over; arguments left to their default are not in it."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = (argument.name for argument in node.target._schema.arguments)
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
