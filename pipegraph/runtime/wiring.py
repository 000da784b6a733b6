"""Where a stage's inputs come from and where its outputs go: the manifest's values, laid out for the executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from msgspec import UNSET
from torch import Tensor

from pipegraph.errors import PackageError, RuntimeFault
from pipegraph.package import CALLER, Manifest, Value
from pipegraph.schedule import Action, Kind, Schedule


@dataclass(frozen=True)
class Edge:
    """The values that go from one stage to another, and those of them whose gradients come back."""

    producer: int
    consumer: int
    values: tuple[Value, ...]

    @cached_property
    def gradients(self) -> tuple[Value, ...]:
        return tuple(value for value in self.values if value.requires_grad)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.values)


@dataclass(frozen=True)
class Transfer:
    """One message: all values of one edge, for one microbatch, in one direction.

    Attributes:
        ranks: of the sender and of the receiver.
    """

    sender: int
    receiver: int
    backward: bool
    microbatch: int
    ranks: tuple[int, int]
    values: tuple[Value, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.values)

    def __str__(self) -> str:
        action = f"{self.sender}SEND_{'B' if self.backward else 'F'}{self.microbatch}"
        return f"stage {self.sender}, action {action}, microbatch {self.microbatch}"

    @property
    def key(self) -> tuple[int, int, int]:
        """Equal at both ends, and unique within a step: the direction is known from which stage comes first."""
        return self.sender, self.receiver, self.microbatch


@dataclass(frozen=True)
class StageWiring:
    """One stage's inputs and outputs, and its edges from earlier stages and to later ones."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    arriving: tuple[Edge, ...]
    leaving: tuple[Edge, ...]

    @property
    def input_gradients(self) -> tuple[bool, ...]:
        """Whether the gradient of each input is always needed. Those of the caller's inputs are if the tensor of a call
        requires one."""
        return tuple(value.requires_grad and value.producer != CALLER for value in self.inputs)

    @property
    def output_gradients(self) -> tuple[bool, ...]:
        """Whether a gradient of each output comes back, or the loss may ask for one."""
        return tuple(value.requires_grad or not value.consumers for value in self.outputs)


def stage_wirings(manifest: Manifest) -> tuple[StageWiring, ...]:
    """The wiring of every stage."""
    edges = [
        Edge(producer, consumer, tuple(manifest.values[name] for name in manifest.edge_values(producer, consumer)))
        for producer, consumer in manifest.edges()
    ]
    return tuple(
        StageWiring(
            inputs=tuple(manifest.values[name] for name in stage.inputs),
            outputs=tuple(manifest.values[name] for name in stage.outputs),
            arriving=tuple(edge for edge in edges if edge.consumer == stage.index),
            leaving=tuple(edge for edge in edges if edge.producer == stage.index),
        )
        for stage in manifest.stages
    )


def transfer_of(action: Action, wiring: Sequence[StageWiring], placement: Sequence[int]) -> Transfer:
    """The message that a SEND or RECV action moves."""
    peer = action.partner.stage
    backward = action.kind in (Kind.SEND_B, Kind.RECV_B)
    sender, receiver = (action.stage, peer) if action.sends else (peer, action.stage)
    producer, consumer = (receiver, sender) if backward else (sender, receiver)
    edge = next(edge for edge in wiring[producer].leaving if edge.consumer == consumer)
    values = edge.gradients if backward else edge.values
    ranks = placement[sender], placement[receiver]
    return Transfer(sender, receiver, backward, action.microbatch, ranks, values)


def rank_pairs(schedule: Schedule, processes: Sequence[int]) -> set[tuple[int, int]]:
    """The (sender, receiver) of all transfers of a lowered schedule, each as the process of its rank."""
    places = [processes[rank] for rank in schedule.placement]
    sends = (action for row in schedule.actions for action in row if action.sends)
    return {(places[send.stage], places[send.partner.stage]) for send in sends}


def named_outputs(
    wiring: StageWiring,
    outputs: Sequence[Any],
    shape: Callable[[Value], tuple[int, ...]],
    dtype: Callable[[Value], torch.dtype],
) -> dict[str, Tensor]:
    """A stage's outputs by name, as its consumers take them: in the memory layout of the manifest, because a consumer
    compiles for one.

    If a region of autocast around the step has given a float another dtype than its consumers expect, it is cast.
    Raises RuntimeFault if the outputs are not those that the manifest promises.

    Args:
        shape, dtype: of a value in this microbatch.
    """
    if len(outputs) != len(wiring.outputs):
        names = ", ".join(value.name for value in wiring.outputs)
        raise RuntimeFault(
            f"the stage returned {len(outputs)} values; pipeline.json lists {len(wiring.outputs)}: {names}.",
            "correct what its forward returns.",
        )
    by_name = {}
    for value, output in zip(wiring.outputs, outputs, strict=True):
        by_name[value.name] = output
        if not value.consumers:
            continue
        if not isinstance(output, Tensor):
            raise RuntimeFault(
                f"the stage returned a {type(output).__name__} for {value.name}, which goes to stage "
                f"{value.consumers[0]}.",
                f"correct what its forward returns; pipeline.json lists {value}.",
            )
        promised = dtype(value)
        if output.dtype != promised and _is_autocast(output, promised):
            output = output.to(promised)
        if not (output.shape == shape(value) and output.dtype == promised):
            raise RuntimeFault(
                f"the stage returned {value.name} as {dtype_name(output)}{list(output.shape)}; pipeline.json promises "
                f"{value.name} {value.dtype}{list(shape(value))} to stage {value.consumers[0]}.",
                "correct the stage's source, or `values` in pipeline.json; to give all stages another dtype, use "
                "parallelize_fn.",
            )
        by_name[value.name] = from_memory(value, in_memory(value, output))
    return by_name


def in_memory(value: Value, tensor: Tensor) -> Tensor:
    """A value, or its gradient, as a contiguous tensor, whose dimensions are in the order in which the manifest lays
    them out in memory. It is copied if it lies there otherwise."""
    return tensor.contiguous() if value.dim_order is UNSET else tensor.permute(value.dim_order).contiguous()


def shape_in_memory(value: Value, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of what `in_memory` returns for a value of a shape."""
    return tuple(shape) if value.dim_order is UNSET else tuple(shape[dim] for dim in value.dim_order)


def from_memory(value: Value, tensor: Tensor) -> Tensor:
    """What `in_memory` was given, in the same memory."""
    if value.dim_order is UNSET:
        return tensor
    order = value.dim_order
    return tensor.permute([order.index(dim) for dim in range(tensor.dim())])


def random_for(value: Value, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random numbers of a shape that a value may have, on the CPU: integers are below its bound."""
    dtype = torch_dtype(value)
    if dtype.is_floating_point or dtype.is_complex:
        # In float32 and cast, because some dtypes have no random generator.
        kind = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(tuple(shape), generator=generator, dtype=kind).to(dtype)
    bound = 2 if dtype == torch.bool or value.bound is None else value.bound
    return torch.randint(max(bound, 1), tuple(shape), generator=generator).to(dtype)


def zeros_for(value: Value, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of a shape in the place of a value, which lie in memory as it does."""
    return from_memory(value, torch.zeros(shape_in_memory(value, shape), dtype=dtype, device=device))


def _is_autocast(output: Tensor, promised: torch.dtype) -> bool:
    """Whether a region of autocast explains that the output has another dtype than was promised."""
    are_floats = output.is_floating_point() and promised.is_floating_point
    return are_floats and torch.is_autocast_enabled(output.device.type)


def torch_dtype(value: Value) -> torch.dtype:
    """The dtype of a value. Raises PackageError if torch has none of that name."""
    dtype = getattr(torch, value.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PackageError(
            f'pipeline.json gives {value.name} the dtype "{value.dtype}", which torch does not have.',
            'one that it has, such as "float32"; or split the model again.',
        )
    return dtype


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
