"""Floating-point operations and bytes of a captured graph, before Inductor's decompositions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from pipegraph.graph.captured import runs_in_training
from pipegraph.graph.nodes import on_meta


def count_flops(nodes: Iterable[fx.Node]) -> list[int]:
    """Count the floating-point operations of each node with torch's counter.

    Of equal nodes one is run, on meta tensors, so that a composite operation (``linear``, attention) counts as what it
    is made of. Elementwise work counts as zero, as it does in torch, and so does what runs in evaluation mode only.
    """
    counted: dict[str, int] = {}
    found: list[int] = []
    for node in nodes:
        key = f"{node.target} {fx.map_arg((node.args, node.kwargs), _signature)}"
        if key not in counted:
            counted[key] = _flops(node)
        found.append(counted[key] if runs_in_training(node) else 0)
    return found


def value_bytes(node: fx.Node) -> int:
    """Return the size of a node's value."""
    value = node.meta["val"]
    return int(value.numel() * value.element_size())


def _signature(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}" if isinstance(value, torch.Tensor) else str(value)


def _flops(node: fx.Node) -> int:
    values = [each.meta.get("val") for each in node.all_input_nodes]
    floats = any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)
    if not floats or not callable(node.target):
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), on_meta)
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.no_grad():
            node.target(*args, **{name: value for name, value in kwargs.items() if name != "device"})
    except (RuntimeError, NotImplementedError, TypeError):
        return 0  # no meta kernel: such an operation has no formula in the registry either
    return int(counter.get_total_flops())
