"""What a step is expected to take, as a plan's file and a manifest hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, structs

from pipegraph.errors import ArgumentError
from pipegraph.package.json_file import Count, Entry, FieldError, Figure, LongText, Name, Text, choice_of
from pipegraph.recompute import describe_stages, parse_stages
from pipegraph.units import format_bytes, format_count, format_number_of, format_percent, format_seconds

SMALLEST, LARGEST = 0.01, 100.0
"""The limits of measured ratios: a profile with ratios outside them belongs to another device."""

Ratio = Annotated[float, Meta(ge=SMALLEST, le=LARGEST)]


class MeasuredRatio(Entry, frozen=True):
    """Seconds that F, I and W took on the device, as multiples of what the figures of its profile come to."""

    forward: Ratio
    input_grad: Ratio
    weight_grad: Ratio

    def corrected_times(self, times: tuple[float, float, float]) -> tuple[float, float, float]:
        """Times of F, I and W, corrected."""
        forward, of_inputs, of_weights = times
        return forward * self.forward, of_inputs * self.input_grad, of_weights * self.weight_grad


UNCORRECTED: Final = MeasuredRatio(1.0, 1.0, 1.0)

PRECISIONS: Final = ("fp32", "bf16", "fp16", "bf16-true", "fp16-true", "bf16-master", "fp8")
"""The names of what a model may be planned to be trained in (`pipegraph.cost.training_state`)."""


class RankMemory(Entry, frozen=True):
    """Bytes that a rank needs, by kind.

    Attributes:
        parameters: with the copies that kernels read in their place.
        gradients: of the parameters that are trained.
        optimizer_state: moments, and an optimizer's own copies of parameters.
        model_buffers: buffers and constants of the model.
        activations: kept for backwards, at the moment of their peak; None if not known.
        receive_buffers: to receive into.
        transient: on top of these at the most, while F, I, W or B runs; None if not known.
        allowance: what the allocator needs on top, for blocks between others.
    """

    parameters: Count
    gradients: Count
    optimizer_state: Count
    model_buffers: Count
    activations: Count | None
    receive_buffers: Count
    transient: Count | None
    allowance: Count = 0

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    @classmethod
    def kinds(cls) -> tuple[str, ...]:
        """Return the kinds, in order."""
        return tuple(name.replace("_", " ") for name in cls.__struct_fields__)

    def by_kind(self) -> dict[str, int]:
        """Return kind → bytes, without those that are not known."""
        sizes = zip(self.kinds(), msgspec.structs.astuple(self), strict=True)
        return {kind: size for kind, size in sizes if size is not None}


class StagePrediction(Entry, frozen=True):
    """One stage and one microbatch: F, I and W in the prediction's unit, and bytes.

    ``weight_saved_bytes``, ``transient_bytes``, what F, I, W and B need while they run, ``added_bytes``, the parameters
    whose gradients are made before they are added, ``trained_bytes`` and ``optimizer_bytes`` are None in plans that
    were written before they were known; ``offloaded_bytes`` if nothing waits in CPU memory.
    """

    forward: Figure
    input_grad: Figure
    weight_grad: Figure
    saved_bytes: Count
    parameter_bytes: Count
    weight_saved_bytes: Count | None = None
    offloaded_bytes: Count | None = None
    transient_bytes: tuple[Count, Count, Count, Count] | None = None
    added_bytes: Count | None = None
    trained_bytes: Count | None = None
    optimizer_bytes: Count | None = None

    @property
    def total(self) -> float:
        return self.forward + self.input_grad + self.weight_grad


class ShiftedCut(Entry, frozen=True):
    """The next place for a cut on one side, and the value of the plan with the cut there; None if it does not fit."""

    point: Name
    value: Figure | None


class Cut(Entry, frozen=True):
    """A cut of a plan.

    Attributes:
        point: the split point that starts a stage there.
        boundary_bytes: bytes that cross the cut per microbatch.
        earlier, later: the next places for the cut; None if a stage would be empty.
        reason: why the cut is at this place.
    """

    point: Name
    boundary_bytes: Count
    earlier: ShiftedCut | None
    later: ShiftedCut | None
    reason: str = ""


class Prediction(Entry, frozen=True, kw_only=True, rename={"stages": "costs"}):
    """The predicted time and memory of a plan.

    Attributes:
        balance, hardware: how the plan was priced.
        recompute: what backwards compute again, as `pipegraph.recompute.parse_stages` takes it.
        unit: the unit of times and ``value``: s, or that of the balanced quantity.
        schedule, placement, microbatches: of a step; ``placement`` gives the rank of each stage.
        order: the actions of each rank, as a line of a schedule's CSV file has them; empty if the schedule's name says
            them.
        edges: (producer, consumer) pairs of stages between which values pass, if the order is for stages side by side.
        value: of a step or, for a unit other than seconds, of the largest stage.
        places: the number of places for a cut; all of them were considered.
        lower_bound: no cuts at these places have a lower value, as far as segments add up to stages; None if the cuts
            were given, or if stages stand side by side.
        memory: bytes that each rank needs.
        memory_parts: the same by kind; empty in plans that were written before it was counted.
        precision: in which dtypes the model is trained; None for its own.
        optimizer: the optimizer, or the bytes of its state for each parameter.
        zero1: whether ``memory`` counts on an optimizer whose state the ranks along dp_replicate divide.
        allowance: the part of activations and buffers that the allocator needs on top of them.
        cuts: the cuts between stages.
        mesh: the dimensions of the mesh other than the pipeline's, by name; empty for one pipeline. ``value`` includes
            the time of their collectives.
        resident: the number of stages of a rank that are whole at a time, if ranks along dp_shard divide their
            parameters; None for all.
        stages: the prediction of each stage; empty in a manifest, whose entries of stages hold it.
        measured_ratio: the measured ratio of the hardware when the plan was priced.
    """

    balance: Text
    recompute: Text
    hardware: Text
    measured_ratio: MeasuredRatio = UNCORRECTED
    unit: Annotated[str, choice_of("s", "FLOP", "parameters", "layers", "bytes")]
    schedule: Name
    placement: Annotated[tuple[Count, ...], Meta(min_length=1)]
    microbatches: Annotated[int, Meta(ge=1, le=10**6)]
    order: tuple[LongText, ...] = ()
    edges: tuple[tuple[Count, Count], ...] = ()
    value: Figure
    places: Count
    lower_bound: Figure | None
    memory: Annotated[tuple[Count, ...], Meta(min_length=1)]
    memory_parts: tuple[RankMemory, ...] = ()
    precision: Annotated[str, choice_of(*PRECISIONS)] | None = None
    optimizer: Name = "adamw"
    zero1: bool = False
    allowance: Annotated[float, Meta(ge=0, le=1)] = 0.0
    mesh: dict[Annotated[str, choice_of("dp_replicate", "dp_shard", "tp")], Annotated[int, Meta(ge=1, le=65536)]] = (
        msgspec.field(default_factory=dict)
    )
    resident: Annotated[int, Meta(ge=1, le=65536)] | None = None
    stages: tuple[StagePrediction, ...] = ()
    cuts: tuple[Cut, ...]

    def __post_init__(self) -> None:
        if {*self.placement} != {*range(len(self.memory))}:
            raise FieldError(
                "placement", f"it is on ranks {sorted({*self.placement})}, and memory is of {len(self.memory)} ranks"
            )
        if self.order and len(self.order) != len(self.memory):
            raise FieldError("order", f"it is of {len(self.order)} ranks, and memory is of {len(self.memory)}")
        if self.edges and not self.order:
            raise FieldError("edges", "they are those of an order, and order is empty")
        if any(not producer < consumer < len(self.placement) for producer, consumer in self.edges):
            raise FieldError("edges", "each leads from a stage to a later one")
        if self.memory_parts and tuple(parts.total for parts in self.memory_parts) != self.memory:
            raise FieldError("memory_parts", "its sums are not the bytes of memory")
        try:
            parse_stages(self.recompute, len(self.placement))
        except ArgumentError as error:
            raise FieldError("recompute", str(error).partition("\n")[0].replace("recompute", "it", 1)) from None

    @property
    def recompute_text(self) -> str:
        """What backwards compute again, in a line."""
        return describe_stages(parse_stages(self.recompute, len(self.placement)))

    @property
    def mesh_text(self) -> str:
        """``pp 2 × dp_shard 2, with 1 stage of a rank whole at a time``; empty for one pipeline."""
        return mesh_text(self.ranks, self.mesh, self.resident)

    @property
    def in_seconds(self) -> bool:
        return self.unit == "s"

    @property
    def ranks(self) -> int:
        return len(self.memory)

    @property
    def peak(self) -> int:
        """Bytes that the fullest rank needs."""
        return max(self.memory)

    @property
    def gap(self) -> float | None:
        """The part of the value by which other cuts can be better at most; None if that is not known."""
        if self.lower_bound is None:
            return None
        return 1 - self.lower_bound / self.value if self.value > 0 else 0.0

    def with_reasons(self) -> Prediction:
        """The same with a reason in each cut."""
        cuts = (structs.replace(cut, reason=self.reason(number)) for number, cut in enumerate(self.cuts))
        return structs.replace(self, cuts=tuple(cuts))

    def reason(self, number: int) -> str:
        """Return why a cut is at its place: ``stages 0 and 1 take 3.1 ms and 3.2 ms; 2.0 MiB cross; …``."""
        cut, upstream, downstream = self.cuts[number], self.stages[number], self.stages[number + 1]
        words = [
            f"stages {number} and {number + 1} take {self.amount(upstream.total)} and {self.amount(downstream.total)}",
            f"{format_bytes(cut.boundary_bytes)} cross",
        ]
        for side, shifted in (("earlier", cut.earlier), ("later", cut.later)):
            if shifted is not None:
                words.append(f"one segment {side}, at {shifted.point}, {self.change(shifted)}")
        return "; ".join(words)

    def change(self, shifted: ShiftedCut) -> str:
        """By how much the value would change with the cut there instead: ``+1.20 %``."""
        if shifted.value is None:
            return "does not fit"
        part = shifted.value / self.value - 1 if self.value else 0.0
        if abs(part) < 5e-5:
            return "no change"
        return format_percent(part, signed=True, decimals=2)

    def amount(self, value: float) -> str:
        """A value with its unit: ``3.12 ms``, ``51.3 GFLOP``."""
        if self.in_seconds:
            return format_seconds(value)
        return format_bytes(value) if self.unit == "bytes" else format_count(value, self.unit)

    @property
    def in_a_line(self) -> str:
        """The value and its schedule: ``250 ms a step of zb-v with 8 microbatches``."""
        if not self.in_seconds:
            return f"{self.amount(self.value)} in the largest stage"
        microbatches = format_number_of("microbatch", self.microbatches)
        return f"{self.amount(self.value)} a step of {self.schedule} with {microbatches}"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, with the gap. What says nothing is left out: a ratio that corrects nothing, no costs."""
        silent = {"costs"} if not self.stages else set()
        silent |= {
            name
            for name in ("order", "edges", "mesh", "resident", "memory_parts", "precision", "zero1", "allowance")
            if not getattr(self, name)
        }
        silent |= {"optimizer"} if self.optimizer == "adamw" else set()
        silent |= {"measured_ratio"} if self.measured_ratio == UNCORRECTED else set()
        fields: dict[str, Any] = {}
        for name, value in msgspec.to_builtins(self).items():
            if name == "memory":
                fields["gap"] = None if self.gap is None else round(self.gap, 6)
            if name not in silent:
                fields[name] = value
        for stage in fields.get("costs", ()):
            if stage["offloaded_bytes"] is None:
                del stage["offloaded_bytes"]
        return fields


def mesh_text(ranks: int, mesh: Mapping[str, int], resident: int | None = None) -> str:
    """Return the dimensions of a mesh with a pipeline of ``ranks``, without those of one rank; empty for a pipeline."""
    dimensions = [f"{name} {length}" for name, length in mesh.items() if length > 1]
    suffix = "" if resident is None else f", with {format_number_of('stage', resident)} of a rank whole at a time"
    return f"{' × '.join([f'pp {ranks}', *dimensions])}{suffix}" if dimensions else ""
