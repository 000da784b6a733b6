"""Floating-point operations and bytes of a stage for one microbatch, and bytes of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from pipegraph.cost.roofline.flops import count_flops, value_bytes
from pipegraph.graph.captured import StateEntry
from pipegraph.package import StageCost


def stage_cost(
    nodes: Iterable[fx.Node], state: Iterable[StateEntry], received: Iterable[fx.Node], sent: Iterable[fx.Node]
) -> StageCost:
    """Add up a stage. Operations are counted by torch's own registry (``torch.utils.flop_counter``)."""
    held = {entry.canonical: entry for entry in state}.values()
    return StageCost(
        flops=sum(count_flops(nodes)),
        parameters=sum(entry.numel for entry in held if entry.kind == "parameter"),
        parameter_bytes=parameter_bytes(held),
        trained_bytes=parameter_bytes(held, trained=True),
        buffer_bytes=buffer_bytes(held),
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
