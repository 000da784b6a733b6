"""Floating-point operations and bytes of a stage, for one microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from pipegraph.cost.state import buffer_bytes, parameter_bytes
from pipegraph.graph.captured import StateEntry
from pipegraph.graph.nodes import on_meta


@dataclass(frozen=True)
class StageCost:
    """What one microbatch on one stage needs.

    Attributes:
        flops: floating-point operations of the forward; the backward takes about twice as many.
        parameters: elements of the stage's parameters, a tied weight counted once.
        parameter_bytes: their size.
        trained_bytes: of them, those of parameters that have a gradient.
        buffer_bytes: buffers and constants.
        input_bytes, output_bytes: what the stage receives from other stages and sends to them.
        saved_bytes: activations that F keeps for the backward;
        weight_saved_bytes: what is kept from the end of I to that of W; and
        forward, input_grad, weight_grad: predicted seconds of F, I and W. None where nothing was priced.
    """

    flops: int
    parameters: int
    parameter_bytes: int
    trained_bytes: int
    buffer_bytes: int
    input_bytes: int
    output_bytes: int
    saved_bytes: int | None = None
    weight_saved_bytes: int | None = None
    forward: float | None = None
    input_grad: float | None = None
    weight_grad: float | None = None

    def to_json(self) -> dict[str, float]:
        """The fields by name, without those that are None."""
        return {name: figure for name, figure in asdict(self).items() if figure is not None}


def stage_cost(
    nodes: Iterable[fx.Node], state: Iterable[StateEntry], received: Iterable[fx.Node], sent: Iterable[fx.Node]
) -> StageCost:
    """Add up a stage. Operations are counted by torch's own registry (``torch.utils.flop_counter``)."""
    held = {entry.canonical: entry for entry in state}.values()
    return StageCost(
        flops=sum(flops_of(nodes)),
        parameters=sum(entry.numel for entry in held if entry.kind == "parameter"),
        parameter_bytes=parameter_bytes(held),
        trained_bytes=parameter_bytes(held, trained=True),
        buffer_bytes=buffer_bytes(held),
        input_bytes=sum(value_bytes(node) for node in received),
        output_bytes=sum(value_bytes(node) for node in sent),
    )


def flops_of(nodes: Iterable[fx.Node]) -> list[int]:
    """Floating-point operations of each node. One of equal nodes is run on meta tensors under torch's counter, so that
    a composite operation (``linear``, attention) counts as what it is made of. Elementwise work counts as zero, as
    there."""
    counted: dict[str, int] = {}
    found: list[int] = []
    for node in nodes:
        key = f"{node.target} {fx.map_arg((node.args, node.kwargs), _form)}"
        if key not in counted:
            counted[key] = _flops(node)
        found.append(counted[key])
    return found


def _form(node: fx.Node) -> Any:
    """A value as text: equal for values that look the same."""
    value = node.meta.get("val")
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}" if isinstance(value, torch.Tensor) else str(value)


def _flops(node: fx.Node) -> int:
    leaves = [leaf for leaf in node.all_input_nodes if isinstance(leaf.meta.get("val"), torch.Tensor)]
    if not any(leaf.meta["val"].is_floating_point() for leaf in leaves) or not callable(node.target):
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), on_meta)
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.no_grad():
            node.target(*args, **{name: value for name, value in kwargs.items() if name != "device"})
    except (RuntimeError, NotImplementedError, TypeError):
        return 0  # no meta kernel: such an operation has no formula in the registry either
    return int(counter.get_total_flops())


def value_bytes(node: fx.Node) -> int:
    """Size of a value that crosses."""
    value = node.meta["val"]
    return int(value.numel() * value.element_size())
