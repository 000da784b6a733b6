"""Floating-point operations and bytes of a stage, for one microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from torch import fx

from pipegraph.cost.roofline.flops import flops_of, value_bytes
from pipegraph.cost.state_bytes import buffer_bytes, parameter_bytes
from pipegraph.graph.captured import StateEntry


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
