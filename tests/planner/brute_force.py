"""A slow planner to compare with: it simulates every cut, and counts every rank's memory action by action."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from hypothesis import strategies as st

from pipegraph.cost import ONCE, MemoryFactors, SegmentCost, TransientBytes
from pipegraph.schedule import Action, Kind, Schedule, Times, build, lower, names, receive_buffers, simulate
from pipegraph.schedule.lifetimes import offload_windows
from pipegraph.schedule.recipes import find_recipe

Cuts = tuple[int, ...]
Link = tuple[float, float] | None
WHOLE_NUMBERS = st.integers(0, 20).map(float)


def every_cut(segments: int, stages: int) -> list[Cuts]:
    return list(combinations(range(1, segments), stages - 1))


def staged(costs: Sequence[SegmentCost], cuts: Cuts) -> list[Sequence[SegmentCost]]:
    """The segments of each stage."""
    return [costs[begin:end] for begin, end in pairwise((0, *cuts, len(costs)))]


def total(stages: Sequence[Sequence[SegmentCost]], name: str) -> list[float]:
    return [sum(getattr(cost, name) for cost in stage) for stage in stages]


def makespan(costs: Sequence[SegmentCost], cuts: Cuts, schedule: Schedule, link: Link = None) -> float:
    """By `simulate`. The first stage's I has nothing to do, and its W does all of the backward."""
    stages = staged(costs, cuts)
    forward, back, weight = (total(stages, name) for name in ("forward", "input_grad", "weight_grad"))
    back[0], weight[0] = 0.0, back[0] + weight[0]
    crosses = [rank != next_rank for rank, next_rank in pairwise(schedule.placement)]
    latency, bandwidth = link or (0.0, float("inf"))
    hop = [latency if crossed else 0.0 for crossed in crosses]
    sent = [
        costs[cut - 1].boundary_bytes / bandwidth if crossed else 0.0
        for cut, crossed in zip(cuts, crosses, strict=True)
    ]
    return simulate(schedule, Times(forward, back, weight, hop, sent)).makespan


def slowest_stage(costs: Sequence[SegmentCost], cuts: Cuts) -> float:
    stages = staged(costs, cuts)
    return max(sum(cost.forward + cost.input_grad + cost.weight_grad for cost in stage) for stage in stages)


def memory(
    costs: Sequence[SegmentCost], cuts: Cuts, schedule: Schedule, factors: MemoryFactors = ONCE, ahead: int = 4
) -> list[float]:
    """Bytes of each rank."""
    stages = staged(costs, cuts)
    saved, parameters, buffered = (total(stages, name) for name in ("saved_bytes", "parameter_bytes", "buffer_bytes"))
    trained = [sum(_or(cost.trained_bytes, cost.parameter_bytes) for cost in stage) for stage in stages]
    added = [
        sum(_or(cost.added_bytes, _or(cost.trained_bytes, cost.parameter_bytes)) for cost in stage) for stage in stages
    ]
    moments = [
        sum(_or(cost.optimizer_bytes, 2 * _or(cost.trained_bytes, cost.parameter_bytes)) for cost in stage)
        for stage in stages
    ]
    weights = [sum(_or(cost.weight_saved_bytes, cost.saved_bytes) for cost in stage) for stage in stages]
    offloaded = total(stages, "offloaded_bytes")
    weights[0] = saved[0] + (costs[cuts[0] - 1].boundary_bytes if cuts else 0)
    buffers = receive_buffers(lower(schedule), ahead, saved=False)
    rank_bytes = []
    for rank, order in enumerate(schedule.actions):
        usage = peak = 0.0
        away = offload_windows(order)
        for position, action in enumerate(order):
            # Bytes offloaded after this action are gone when it ends; bytes loaded before it are there when it begins.
            usage += sum(offloaded[window.stage] for window in away if window.back == position)
            full, weight = saved[action.stage], weights[action.stage]
            changes = {Kind.F: full if schedule.trains else 0, Kind.B: -full, Kind.I: weight - full, Kind.W: -weight}
            outgoing = sum(offloaded[window.stage] for window in away if window.departure == position)
            previous, usage = usage, usage + changes[action.kind] - outgoing
            peak = max(peak, usage, _while_it_runs(action, previous, usage, stages[action.stage], added[action.stage]))
        resident = [stage for stage in range(schedule.stages) if schedule.placement[stage] == rank]
        states = sum((factors.parameters + factors.copies) * parameters[stage] + buffered[stage] for stage in resident)
        if schedule.trains:
            states += sum(factors.gradients * trained[stage] + factors.optimizer * moments[stage] for stage in resident)
        received = [
            count * costs[cuts[min(edge)] - 1].boundary_bytes for edge, count in buffers.items() if edge[1] in resident
        ]
        rank_bytes.append(states + (1 + factors.allowance) * (peak + sum(received)))
    return rank_bytes


def _while_it_runs(
    action: Action, usage_before: float, usage_after: float, segments: Sequence[SegmentCost], gradients: float
) -> float:
    """The first stage's I has nothing to do, and its W does all of the backward."""
    kind = Kind.B if action.kind is Kind.W and action.stage == 0 else action.kind
    if kind is Kind.I and action.stage == 0:
        return usage_after
    need = max(cost.transient_bytes[(Kind.F, Kind.I, Kind.W, Kind.B).index(kind)] for cost in segments)
    new_gradients = gradients if action.kind in (Kind.W, Kind.B) else 0.0
    return need + max(usage_after + new_gradients, 0.0 if kind is Kind.F else usage_before)


def _or(figure: float | None, default: float) -> float:
    return default if figure is None else figure


@st.composite
def _segments(draw: st.DrawFn, figures: st.SearchStrategy[float]) -> SegmentCost:
    """A segment; its latter figures are given, or left to follow from the others."""
    sizes = st.integers(0, 50)
    parameters = draw(sizes)
    trained, weight_saved = draw(st.none() | st.integers(0, parameters)), draw(st.none() | sizes)
    seconds = [draw(figures) for _ in range(3)]
    byte_counts = parameters, 0, weight_saved, trained, draw(st.just(0) | sizes)
    transient = draw(st.just(TransientBytes()) | st.builds(TransientBytes, sizes, sizes, sizes, sizes))
    added = draw(st.none() | st.integers(0, parameters if trained is None else trained))
    optimizer = draw(st.none() | sizes)
    return SegmentCost(
        *seconds,
        draw(sizes),
        draw(sizes),
        *byte_counts,
        transient_bytes=transient,
        added_bytes=added,
        optimizer_bytes=optimizer,
    )


memory_factors = st.just(ONCE) | st.builds(
    MemoryFactors,
    parameters=st.sampled_from([0.25, 1.0, 2.0]),
    copies=st.sampled_from([0.0, 1.0]),
    gradients=st.sampled_from([1.0, 2.0]),
    optimizer=st.sampled_from([0.25, 1.0]),
    allowance=st.sampled_from([0.0, 0.25]),
)
"""What ranks hold of their stages, in quarters, which add up exactly."""


def costs(segments: int, figures: st.SearchStrategy[float] = WHOLE_NUMBERS) -> st.SearchStrategy[list[SegmentCost]]:
    """Chains with this number of segments."""
    return st.lists(_segments(figures), min_size=segments, max_size=segments)


@st.composite
def small_schedules(draw: st.DrawFn, name: str | None = None) -> Schedule:
    """A schedule of any name with six stages at most."""
    recipe = find_recipe(draw(st.sampled_from(names())) if name is None else name)
    chunks = draw(st.integers(1, 3)) if recipe.any_chunks else recipe.chunks
    ranks = draw(st.integers(1, 4 if chunks == 1 else 6 // chunks))
    microbatches = draw(st.integers(1, 8))
    while recipe.rule(ranks, microbatches):
        microbatches += 1
    return build(recipe.name, ranks, microbatches, chunks)


links = st.none() | st.tuples(st.sampled_from([0.0, 0.5, 5.0]), st.sampled_from([1.0, 10.0, 100.0]))
