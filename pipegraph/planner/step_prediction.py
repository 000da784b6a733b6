"""The prediction of a step: the time and memory of given stages, and what the plan and prices of a package say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np
from msgspec import structs

from pipegraph.cost import ONCE, MemoryFactors, SegmentCost, TransientBytes
from pipegraph.cost.hardware import Hardware, Link
from pipegraph.cost.rank_profiles import RankProfiles, load_profiles
from pipegraph.cost.training_state import TrainingState
from pipegraph.errors import ScheduleError
from pipegraph.package import Manifest, StageCost
from pipegraph.package.prediction import Prediction, RankMemory
from pipegraph.planner.solver.makespan import Links, Makespan
from pipegraph.planner.solver.memory_need import MemoryNeed, MemoryParts
from pipegraph.planner.solver.prefix_sums import PrefixSums
from pipegraph.schedule import CollectiveKind, Schedule, Timeline, Times, build, from_csv, simulate, to_csv
from pipegraph.schedule.branches import have_branches
from pipegraph.schedule.stages import Edge
from pipegraph.units import format_number_of


def stage_times(
    stages: Sequence[SegmentCost], schedule: Schedule, link: Links | None = None, host_link: Link | None = None
) -> Times:
    """Return the times of stages and boundaries, for `simulate`. Without a link, what goes over it takes no time.

    ``host_link`` is that to CPU memory.
    """
    times = Makespan(PrefixSums(stages), schedule, link).times_of(np.arange(1, len(stages)))
    if host_link is None:
        return times
    copies = (host_link.seconds(stage.offloaded_bytes) if stage.offloaded_bytes else 0.0 for stage in stages)
    return replace(times, offload=tuple(copies))


def step_seconds(
    stages: Sequence[SegmentCost], schedule: Schedule, link: Links | None = None, host_link: Link | None = None
) -> float:
    """Return the seconds of a step, as `simulate` computes them. The links are as for `stage_times`."""
    offloads = host_link is not None and any(stage.offloaded_bytes for stage in stages)
    if offloads or schedule.edges is not None:
        return simulate(schedule, stage_times(stages, schedule, link, host_link)).makespan
    cuts = np.arange(1, len(stages))
    return float(Makespan(PrefixSums(stages), schedule, link).values(cuts[None])[0])


def rank_memory(
    stages: Sequence[SegmentCost],
    schedule: Schedule,
    factors: MemoryFactors = ONCE,
    receives_ahead: int = 4,
) -> tuple[RankMemory, ...]:
    """Return what each rank needs, as `solve` counts it."""
    cuts = np.arange(1, len(stages))
    parts = MemoryNeed(PrefixSums(stages), schedule, factors, receives_ahead).parts(cuts[None])
    return tuple(_rank_memory(parts, rank, factors.allowance) for rank in range(schedule.ranks))


def _rank_memory(parts: MemoryParts, rank: int, allowance: float) -> RankMemory:
    """Return the parts of a rank. The last three contain the allowance, which is returned as a separate part."""
    *state, saved, buffers, transient = (float(part[rank, 0]) for part in parts)
    in_step = [part / (1 + allowance) for part in (saved, buffers, transient)]
    return RankMemory(*(math.ceil(round(part, 3)) for part in (*state, *in_step, allowance * sum(in_step))))


def unnamed_order(schedule: Schedule) -> tuple[str, ...]:
    """Return the actions of each rank as lines of a CSV file; empty for a schedule that `build` makes by its name."""
    try:
        named = build(schedule.name, schedule.ranks, schedule.microbatches, schedule.stages // schedule.ranks)
    except ScheduleError:
        named = None
    return () if named is not None and named.actions == schedule.actions else tuple(to_csv(schedule).splitlines())


@dataclass(frozen=True)
class PlannedStep:
    """The step that a package was planned for.

    Attributes:
        schedule: its name.
        placement: the rank of each stage.
        microbatches: the number of microbatches.
        order: the actions of each rank as lines of a CSV file, if the name does not say them.
        edges, gradient_edges: between stages, if some stand side by side.
    """

    schedule: str
    placement: tuple[int, ...]
    microbatches: int
    order: tuple[str, ...] = ()
    edges: tuple[Edge, ...] | None = field(default=None, compare=False)
    gradient_edges: tuple[Edge, ...] | None = field(default=None, compare=False)

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> PlannedStep | None:
        """Return the step; None if the package was cut at given points, or into equal numbers of segments."""
        plan = manifest.prediction
        if plan is None:
            return None
        edges = branch_edges(manifest) or (None, None)
        return cls(plan.schedule, plan.placement, plan.microbatches, plan.order, *edges)

    @property
    def ranks(self) -> int:
        return len(set(self.placement))

    def to_schedule(self) -> Schedule | None:
        """Return the schedule; None if neither the plan nor the name has its order, which is in a file then."""
        if self.order:
            schedule = from_csv("\n".join(self.order) + "\n", self.schedule, transfers=False)
            return schedule.changed(edges=self.edges, gradient_edges=self.gradient_edges)
        try:
            schedule = build(self.schedule, self.ranks, self.microbatches, len(self.placement) // self.ranks)
        except ScheduleError:
            return None
        return schedule if schedule.placement == self.placement else None

    def is_of(self, schedule: Schedule) -> bool:
        """Whether this is a step of the schedule."""
        order = unnamed_order(schedule) if self.order else ()
        return PlannedStep(schedule.name, tuple(schedule.placement), schedule.microbatches, order) == self

    def __str__(self) -> str:
        return describe_step(self.schedule, self.microbatches, self.ranks)


def branch_edges(manifest: Manifest) -> tuple[tuple[Edge, ...], tuple[Edge, ...]] | None:
    """Return the edges between the stages of a package, and those over which a gradient returns; None if no stages
    stand side by side."""
    edges = manifest.edges()
    return (edges, manifest.gradient_edges()) if have_branches(len(manifest.stages), edges) else None


def describe_step(schedule: str, microbatches: int, ranks: int) -> str:
    """Return ``zb-v with 4 microbatches on 2 ranks``."""
    return f"{schedule} with {format_number_of('microbatch', microbatches)} on {format_number_of('rank', ranks)}"


@dataclass(frozen=True)
class StepPrediction:
    """What a step of a package is expected to take.

    Attributes:
        costs: of each stage; None if the package was not priced.
        times: for `simulate`; None if stages have no predicted times.
        timeline: the simulated step; None without times.
        step: seconds; if all ranks run in one process, in turn, the sum of theirs.
        bubble: the part of a step in which ranks compute nothing, the mean over ranks; None if they run in turn.
        memory: of each rank; None if the package was not priced.
        links_known: whether the step counts the time of messages between ranks.
    """

    costs: tuple[SegmentCost, ...] | None
    times: Times | None
    timeline: Timeline | None
    step: float | None
    bubble: float | None
    memory: tuple[RankMemory, ...] | None
    links_known: bool


def predict_step(
    manifest: Manifest,
    schedule: Schedule,
    hardware: Hardware | None = None,
    in_turn: bool = False,
    collectives: Mapping[tuple[int, CollectiveKind], float] | None = None,
    parts: Sequence[float] | None = None,
) -> StepPrediction:
    """Predict a step of a package under a schedule.

    Args:
        hardware: the profile with the links. By default a planned step takes what the plan says, and one of another
            schedule has the links of the profile that priced the package; if pipegraph does not have that profile,
            messages take no time.
        in_turn: whether one process runs all ranks.
        collectives: of each stage and kind of those that the schedule has, the seconds; others take none.
        parts: of each stage, the part of its parameters' bytes that a rank has; by default all.
    """
    costs, plan, planned = _stage_costs(manifest), manifest.prediction, PlannedStep.from_manifest(manifest)
    links = hardware or pricing_devices(manifest)
    times = timeline = step = bubble = None
    is_planned = hardware is None and planned is not None and planned.is_of(schedule) and not schedule.collectives
    if costs is not None and _has_times(manifest):
        times = stage_times(
            costs, schedule, None if links is None else links.link, None if links is None else links.host_link
        )
        unshard, reduce_grad = (
            tuple((collectives or {}).get((stage, kind), 0.0) for stage in range(schedule.stages))
            for kind in (CollectiveKind.UNSHARD, CollectiveKind.REDUCE_GRAD)
        )
        times = replace(times, unshard=unshard, reduce_grad=reduce_grad)
        edges = branch_edges(manifest) if schedule.edges is None and not schedule.lowered else None
        if edges is not None:
            schedule = schedule.changed(edges=edges[0], gradient_edges=edges[1])
        timeline = simulate(schedule, times)
        if in_turn:
            step = sum(times.of(action) for row in schedule.actions for action in row)
        else:
            step = plan.value if plan is not None and is_planned else timeline.makespan
            bubble = 1 - fmean(timeline.busy) / step if step else 0.0
    rank_costs = [*map(_part_of, costs or (), parts or [1.0] * len(costs or ()))]
    return StepPrediction(
        costs=costs,
        times=times,
        timeline=timeline,
        step=step,
        bubble=bubble,
        memory=None if costs is None else rank_memory(rank_costs, schedule, planned_factors(plan)),
        links_known=in_turn or links is not None or is_planned,
    )


def _stage_costs(manifest: Manifest) -> tuple[SegmentCost, ...] | None:
    """Return the costs of a package's stages; None if they were not priced.

    Times are 0 if only bytes were priced (`_has_times`).
    """
    if manifest.prediction is None or any(stage.cost.saved_bytes is None for stage in manifest.stages):
        return None
    crossing = [*(cut.boundary_bytes for cut in manifest.prediction.cuts), 0]
    return tuple(
        SegmentCost(
            *(stage.cost.times or (0.0, 0.0, 0.0)),
            boundary_bytes=boundary_bytes,
            saved_bytes=stage.cost.saved_bytes or 0,
            parameter_bytes=stage.cost.parameter_bytes or 0,
            weight_saved_bytes=stage.cost.weight_saved_bytes,
            trained_bytes=stage.cost.trained_bytes,
            buffer_bytes=stage.cost.buffer_bytes or 0,
            offloaded_bytes=stage.cost.offloaded_bytes or 0,
            transient_bytes=TransientBytes(*(stage.cost.transient_bytes or ())),
            added_bytes=stage.cost.added_bytes,
            optimizer_bytes=stage.cost.optimizer_bytes,
        )
        for stage, boundary_bytes in zip(manifest.stages, crossing, strict=True)
    )


def _part_of(cost: SegmentCost, part: float) -> SegmentCost:
    """Return the cost of a stage if a rank has only a part of its parameters."""

    def of_rank(figure: int | None) -> int | None:
        return None if figure is None else math.ceil(figure * part)

    return replace(
        cost,
        parameter_bytes=math.ceil(cost.parameter_bytes * part),
        trained_bytes=of_rank(cost.trained_bytes),
        added_bytes=of_rank(cost.added_bytes),
        optimizer_bytes=of_rank(cost.optimizer_bytes),
    )


def planned_factors(plan: Prediction | None) -> MemoryFactors:
    """Return how many times a rank holds each part of its stages, in the precision of a plan."""
    if plan is None:
        return ONCE
    return TrainingState(plan.precision).factors._replace(allowance=plan.allowance)


def _has_times(manifest: Manifest) -> bool:
    """Return whether the stages of a package were priced in seconds."""
    return all(stage.cost.times is not None for stage in manifest.stages)


def pricing_profile(manifest: Manifest) -> Hardware | None:
    """Return the profile that priced the package; None if it is not one that pipegraph has, or there are several."""
    devices = pricing_devices(manifest)
    return devices if isinstance(devices, Hardware) else None


def pricing_devices(manifest: Manifest) -> Hardware | RankProfiles | None:
    """Return the profile that priced the package, or those of its ranks; None if pipegraph does not have them."""
    if manifest.prediction is None:
        return None
    text = manifest.prediction.hardware
    names = {part.partition("*")[0] for part in text.split(",")}
    return load_profiles(text) if names <= {*Hardware.names()} else None


def memory_by_kind(manifest: Manifest, schedule: Schedule) -> tuple[RankMemory, ...]:
    """Return what each rank holds; nothing if the package does not have the sizes of its parameters.

    As the planner counts it; without a plan, a parameter that is trained has a gradient and AdamW's two moments, and
    activations and buffers to receive into are left out.
    """
    costs = [stage.cost for stage in manifest.stages]
    plan, planned = manifest.prediction, PlannedStep.from_manifest(manifest)
    if any(cost.parameter_bytes is None for cost in costs):
        return ()
    if plan is not None and plan.memory_parts and planned is not None and planned.is_of(schedule):
        return plan.memory_parts  # other ranks may share the stages
    memory = predict_step(manifest, schedule).memory
    if memory is not None:
        return memory
    known_costs = [_state_cost(cost) for cost in costs]
    return tuple(structs.replace(rank, activations=None, transient=None) for rank in rank_memory(known_costs, schedule))


def _state_cost(cost: StageCost) -> SegmentCost:
    """Return the cost of a stage of which only the sizes of its state are known."""
    return SegmentCost(
        0.0,
        0.0,
        0.0,
        parameter_bytes=cost.parameter_bytes or 0,
        trained_bytes=cost.trained_bytes,
        buffer_bytes=cost.buffer_bytes or 0,
        optimizer_bytes=cost.optimizer_bytes,
        added_bytes=0,
    )
