"""Where a stage's inputs come from and where its outputs go: the manifest's values, laid out for the executor."""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

import torch
from msgspec import UNSET
from torch import Tensor, nn

from pipegraph.errors import PackageError, PipegraphError, RuntimeFault
from pipegraph.kernels.autocast import AutocastState, autocast_state
from pipegraph.kernels.sharded import local
from pipegraph.kernels.trace_guard import ModuleState, unchanged
from pipegraph.package import CALLER, Manifest, Value
from pipegraph.package.routes import routes
from pipegraph.schedule import Action, Kind, Schedule
from pipegraph.torch_private.fake_tensors import fake_tensors


@dataclass(frozen=True)
class Edge:
    """The values that go from one stage to another, and those of them whose gradients come back.

    The producer computes them, or hands them on to a stage on its own rank.
    """

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


def stage_wirings(manifest: Manifest, placement: Sequence[int]) -> tuple[StageWiring, ...]:
    """The wiring of every stage, of which ``placement`` says the rank."""
    edges = [
        Edge(giver, taker, tuple(manifest.values[name] for name in names))
        for (giver, taker), names in routes(manifest, placement).items()
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


# ---- boundary dtypes -------------------------------------------------------------------------------------------------
# The dtypes in which values cross between stages in a region of `torch.autocast`: those that their stages make there.
#
# stage 0 ─ run without memory ─▶ bfloat16 ─ sent to its consumers ─▶ stage 1 ─ run without memory ─▶ …
#
# A receiver has to know the dtype of a message before it comes. It is found at the first call in such a region; all
# ranks make their calls in the same ones, on which they agree before.


Dtypes = dict[str, torch.dtype]
"""value → its dtype"""

_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_AS_PROMISED: Final = -1


class NumberTransport(Protocol):
    """Carries whole numbers between ranks, before the messages of a call."""

    def send_numbers(self, ranks: tuple[int, int], numbers: Sequence[int]) -> None:
        """Send to the second rank."""
        ...

    def receive_numbers(self, ranks: tuple[int, int], count: int) -> list[int]:
        """Wait for the numbers that the first rank sends, and return them."""
        ...


class BoundaryDtypes:
    """Finds the dtypes of the values that the stages of this process take and send, once for each state of autocast.

    Args:
        manifest: has the dtypes of values without autocast, and of values that are not floats.
        wiring: of all stages.
        stages: of this process.
        places: the rank of each stage.
    """

    def __init__(
        self, manifest: Manifest, wiring: Sequence[StageWiring], stages: Mapping[int, nn.Module], places: Sequence[int]
    ) -> None:
        self._sizes, self._wiring, self._stages, self._places = manifest.captured_sizes, wiring, stages, places
        self._dtypes: dict[AutocastState, Dtypes] = {}

    def under_autocast(self, transport: NumberTransport | None) -> Dtypes:
        """The dtypes of floats that differ from the manifest's here and now; none outside of autocast.

        Collective at the first call in a state of autocast. `transport` is None for a plain process.
        """
        state = autocast_state()
        if not any(is_enabled for is_enabled, _ in state):
            return {}
        if state not in self._dtypes:
            self._dtypes[state] = self._find(transport)
        return self._dtypes[state]

    def _find(self, transport: NumberTransport | None) -> Dtypes:
        dtypes: Dtypes = {}
        waiting: dict[tuple[int, int], deque[Edge]] = defaultdict(deque)  # in the order in which their dtypes are sent
        for producer in range(len(self._wiring)):
            for edge in self._wiring[producer].leaving:
                if producer not in self._stages and edge.consumer in self._stages:
                    waiting[self._ranks(edge)].append(edge)
        for index in sorted(self._stages):
            for edge in self._wiring[index].arriving:
                edges = waiting[self._ranks(edge)]
                while transport is not None and edge in edges:
                    next_edge = edges.popleft()
                    numbers = transport.receive_numbers(self._ranks(edge), len(next_edge.values))
                    pairs = zip(next_edge.names, numbers, strict=True)
                    dtypes |= {name: _FLOATS[number] for name, number in pairs if number != _AS_PROMISED}
            dtypes |= self._made_by(index, dtypes)
            for edge in self._wiring[index].leaving:
                if transport is not None and edge.consumer not in self._stages:
                    codes = [_FLOATS.index(dtypes[name]) if name in dtypes else _AS_PROMISED for name in edge.names]
                    transport.send_numbers(self._ranks(edge), codes)
        return dtypes

    def _ranks(self, edge: Edge) -> tuple[int, int]:
        return self._places[edge.producer], self._places[edge.consumer]

    def _made_by(self, index: int, arriving: Dtypes) -> Dtypes:
        """The dtypes that a stage gives to floats, by running it without memory for the captured sizes."""
        stage, wiring = self._stages[index], self._wiring[index]
        modules = list(stage.modules())
        state = ModuleState(modules)
        device = next((tensor.device for tensor in state.tensors()), torch.device("cpu"))
        try:
            with unchanged(modules), fake_tensors(), torch.no_grad():
                empty_tensors = [torch.empty_like(local(tensor), device=tensor.device) for tensor in state.tensors()]
                inputs = [
                    zeros_for(value, value.shape_at(self._sizes), arriving.get(value.name, torch_dtype(value)), device)
                    for value in wiring.inputs
                ]
                with state.replaced(empty_tensors):
                    returned = stage(*inputs)
        except PipegraphError:
            raise
        except Exception as error:  # whatever an operation raises on a fake tensor
            warnings.warn(
                f"what stage {index} makes under autocast cannot be found out beforehand ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}): what it sends is cast to the package's dtypes.",
                stacklevel=2,
            )
            return {}
        outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
        return {
            value.name: output.dtype
            for value, output in zip(wiring.outputs, outputs, strict=False)
            if value.consumers
            and isinstance(output, Tensor)
            and output.dtype in _FLOATS
            and torch_dtype(value) in _FLOATS
            and output.dtype != torch_dtype(value)
        }
