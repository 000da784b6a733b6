"""Floating-point operations and bytes of captured operations, before Inductor's decompositions, and of a stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from pipegraph.graph.captured import StateEntry, runs_in_training
from pipegraph.graph.custom_functions import callable_of
from pipegraph.graph.nodes import on_meta, value_bytes
from pipegraph.package import StageCost


def count_flops(nodes: Iterable[fx.Node]) -> list[int]:
    """Count the floating-point operations of each node with torch's counter.

    Of equal nodes one is run, on meta tensors, so that a composite operation (``linear``, attention) counts as what it
    is made of. Elementwise work counts as zero, as it does in torch, and so does what runs in evaluation mode only.
    """
    counted: dict[str, int] = {}
    flops: list[int] = []
    for node in nodes:
        key = f"{node.target} {fx.map_arg((node.args, node.kwargs), _signature)}"
        if key not in counted:
            counted[key] = _flops(node)
        flops.append(counted[key] if runs_in_training(node) else 0)
    return flops


def _signature(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}" if isinstance(value, torch.Tensor) else str(value)


def _flops(node: fx.Node) -> int:
    values = [input_node.meta.get("val") for input_node in node.all_input_nodes]
    floats = any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)
    if not floats or not callable(node.target):
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), on_meta)
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.no_grad():
            callable_of(node.target)(*args, **{name: value for name, value in kwargs.items() if name != "device"})
    except (RuntimeError, NotImplementedError, TypeError):
        return 0  # no meta kernel: such an operation has no formula in the registry either
    return int(counter.get_total_flops())


def stage_cost(
    nodes: Iterable[fx.Node], state: Iterable[StateEntry], received: Iterable[fx.Node], sent: Iterable[fx.Node]
) -> StageCost:
    """Add up a stage. Operations are counted by torch's own registry (``torch.utils.flop_counter``)."""
    entries = {entry.canonical: entry for entry in state}.values()
    return StageCost(
        flops=sum(count_flops(nodes)),
        parameters=sum(entry.numel for entry in entries if entry.kind == "parameter"),
        parameter_bytes=parameter_bytes(entries),
        trained_bytes=parameter_bytes(entries, trained=True),
        buffer_bytes=buffer_bytes(entries),
        input_bytes=sum(value_bytes(node) for node in received),
        output_bytes=sum(value_bytes(node) for node in sent),
    )


def parameter_bytes(state: Iterable[StateEntry], trained: bool = False) -> int:
    """Return the bytes of parameters, or only of the ``trained`` ones, which have a gradient."""
    parameters = (entry for entry in state if entry.kind == "parameter" and (entry.requires_grad or not trained))
    return sum(entry.numel * entry.dtype.itemsize for entry in parameters)


def buffer_bytes(state: Iterable[StateEntry]) -> int:
    """Return the bytes of buffers and constants."""
    return sum(entry.numel * entry.dtype.itemsize for entry in state if entry.kind != "parameter")
