"""What a planner is compared with: every cut simulated, and every rank's memory counted action by action."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from hypothesis import strategies as st

from pipegraph.cost.segment import SegmentCost
from pipegraph.schedule import Kind, Schedule, Times, build, lower, names, receive_buffers, simulate
from pipegraph.schedule.build import find

Cuts = tuple[int, ...]
Link = tuple[float, float] | None
WHOLE = st.integers(0, 20).map(float)


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
    crosses = [rank != other for rank, other in pairwise(schedule.placement)]
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
    costs: Sequence[SegmentCost], cuts: Cuts, schedule: Schedule, state_factor: float = 4.0, ahead: int = 4
) -> list[float]:
    """Bytes of each rank."""
    stages = staged(costs, cuts)
    saved, parameters = total(stages, "saved_bytes"), total(stages, "parameter_bytes")
    buffers = receive_buffers(lower(schedule), ahead, saved=False)
    found = []
    for rank, order in enumerate(schedule.actions):
        held = peak = 0.0
        for action in order:
            held += saved[action.stage] if action.kind is Kind.F and schedule.has_backward else 0
            peak = max(peak, held)
            held -= saved[action.stage] if action.kind in (Kind.B, Kind.W) else 0
        own = [stage for stage in range(schedule.stages) if schedule.placement[stage] == rank]
        states = (state_factor if schedule.has_backward else 1) * sum(parameters[stage] for stage in own)
        received = [
            count * costs[cuts[min(edge)] - 1].boundary_bytes for edge, count in buffers.items() if edge[1] in own
        ]
        found.append(peak + states + sum(received))
    return found


def costs(segments: int, figures: st.SearchStrategy[float] = WHOLE) -> st.SearchStrategy[list[SegmentCost]]:
    """Chains of so many segments."""
    sizes = st.integers(0, 50)
    cost = st.builds(SegmentCost, figures, figures, figures, st.integers(1, 50), sizes, sizes)
    return st.lists(cost, min_size=segments, max_size=segments)


@st.composite
def small_schedules(draw: st.DrawFn, name: str | None = None) -> Schedule:
    """A schedule of any name with six stages at most."""
    recipe = find(draw(st.sampled_from(names())) if name is None else name)
    chunks = draw(st.integers(1, 3)) if recipe.any_chunks else recipe.chunks
    ranks = draw(st.integers(1, 4 if chunks == 1 else 6 // chunks))
    microbatches = draw(st.integers(1, 8))
    while recipe.rule(ranks, microbatches):
        microbatches += 1
    return build(recipe.name, ranks, microbatches, chunks)


links = st.none() | st.tuples(st.sampled_from([0.0, 0.5, 5.0]), st.sampled_from([1.0, 10.0, 100.0]))
