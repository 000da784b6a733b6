"""``solve``: where to cut a chain of segments into stages, with a proof of how good that is, and advice if none fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pipegraph.cost import SegmentCost
from pipegraph.errors import PlanError, ScheduleError, nearest
from pipegraph.planner.solver.cut_search import equal_parts, search_cuts
from pipegraph.planner.solver.cut_space import CutSpace
from pipegraph.planner.solver.local_search import EQUAL, Incumbents, has_no_empty_stage
from pipegraph.planner.solver.makespan import Links, Makespan
from pipegraph.planner.solver.memory_need import MemoryNeed
from pipegraph.planner.solver.objective import MemoryLimited, Objective, SlowestStage
from pipegraph.planner.solver.prefix_sums import SAVED, STATE, TIMES, Integers, PrefixSums
from pipegraph.planner.solver.solve_arguments import (
    check_costs,
    check_numbers,
    memory_of_ranks,
    resolve_schedule,
)
from pipegraph.schedule import Schedule, Times, simulate
from pipegraph.units import format_bytes

OBJECTIVES = "makespan", "bottleneck"

_EFFORT_SHARE = 0.1  # of the effort, to find the least memory for another number of stages
_DOUBLINGS = 3  # of the number of stages


@dataclass(frozen=True)
class Alternative:
    """Cuts with their value, and the bytes that each rank needs."""

    cuts: tuple[int, ...]
    value: float
    memory: tuple[int, ...]


@dataclass(frozen=True)
class Solution(Alternative):
    """The best cuts that `solve` found.

    Attributes:
        cuts: the segments that start a stage, without the first stage's 0.
        value: seconds of a step or, with the objective "bottleneck", of the slowest stage for one microbatch.
        memory: bytes that each rank needs.
        lower_bound: no cuts have a smaller value. It equals the value if the cuts are proved to be the best.
        alternatives: the next best cuts that the search found, by value.
        moved: for each cut, (the value with that cut one segment earlier, one later); infinite if that is impossible.
        schedule: the schedule that the cuts are for. `simulate` shows a step of it with these ``times``.
        times: seconds of stages and boundaries.
    """

    lower_bound: float
    alternatives: tuple[Alternative, ...]
    moved: tuple[tuple[float, float], ...]
    schedule: Schedule = field(repr=False)
    times: Times = field(repr=False)

    @property
    def gap(self) -> float:
        """The part of the value by which other cuts can be better, at most: 0 if these are proved to be the best."""
        return 1 - self.lower_bound / self.value if self.value > 0 else 0.0


def solve(
    costs: Sequence[SegmentCost],
    stages: int,
    schedule: str | Schedule = "1f1b",
    microbatches: int = 8,
    placement: str | None = None,
    ranks: int | None = None,
    objective: str = "makespan",
    memory_bytes: float | str | Sequence[float | str] | None = None,
    link: Links | None = None,
    *,
    state_factor: float = 4.0,
    receives_ahead: int = 4,
    alternatives: int = 5,
    effort: float = 1.0,
    names: Sequence[str] | None = None,
    advises: bool = True,
) -> Solution:
    """Choose where to cut a chain of segments.

    If there are few possible cuts, all are simulated. Otherwise the best are searched for, and a bound says how much
    better others can be. The same arguments give the same result.

    Args:
        costs: the cost of each segment for one microbatch.
        stages: the number of stages to make.
        schedule: a name that `pipegraph.schedule.build` knows, or a schedule.
        microbatches: of a step, if the schedule is a name.
        placement: "loop" or "v"; the schedule must have it.
        ranks: the number of ranks that the schedule must have. A schedule that can have any number of stages on a rank
            gets this number of ranks.
        objective: "makespan", seconds of a step as `simulate` computes them, or "bottleneck", seconds that the slowest
            stage computes for one microbatch.
        memory_bytes: the memory of each rank: one number or size ("80GiB"), or one per rank. Activations, parameters,
            buffers, gradients, optimizer state, receive buffers and what F, I and W need while they run have to fit.
        link: (latency in seconds, bandwidth in bytes per second) between ranks, or a function of (rank, other rank)
            that returns it. Without a link, crossing a boundary takes no time.
        state_factor: how many times a rank holds parameters that have a gradient: 4 for parameters, gradients and the
            two moments of AdamW. It holds frozen parameters once, and without a backward all parameters.
        receives_ahead: how many receives a rank posts before the schedule reaches them.
        alternatives: how many other cuts to return, at most.
        effort: scales how long the search continues. 1 is a few seconds.
        names: of the segments, for messages.
        advises: whether a `MemoryShortage` says how much memory would be enough, which takes long to find.

    Raises:
        PlanError: fewer segments than stages, or arguments that are impossible or do not fit together; a
            `MemoryShortage` if no cuts fit into the memory.
        ScheduleError: an unknown schedule, one that cannot have these numbers, or one that is wrong.
    """
    check_costs(costs, stages, names)
    check_numbers(state_factor, effort, receives_ahead, alternatives)
    if objective not in OBJECTIVES:
        raise PlanError(
            f'There is no objective "{objective}".{nearest(str(objective), OBJECTIVES)} '
            f"The objectives are {' and '.join(OBJECTIVES)}."
        )
    sums, resolved = PrefixSums(costs), resolve_schedule(schedule, stages, microbatches, placement, ranks)
    memory_of = partial(MemoryNeed, sums, state_factor=state_factor, receives_ahead=receives_ahead)
    need = memory_of(resolved, limits=memory_of_ranks(memory_bytes, resolved.ranks))
    makespan = Makespan(sums, resolved, link)
    seconds: Objective = makespan if objective == "makespan" else SlowestStage(sums, stages, resolved.trains)
    space = CutSpace.all_cuts(sums.segments, stages)
    starts = [equal_parts(sums, stages, TIMES if resolved.trains else TIMES[:1])]
    if need.limits:
        space = space.restrict(need.allows)
        if not space.empty:
            starts.append(space.cheapest(seconds.stage_bound, np.maximum))
        elif not advises:
            raise MemoryShortage(f"No cuts fit into {format_bytes(need.limit)} on each rank.", 0)

        def with_stages(stages: int) -> MemoryNeed:
            ranks = stages // (resolved.stages // resolved.ranks)
            return memory_of(resolve_schedule(schedule, stages, microbatches, None, ranks))

        starts = _starts_that_fit(sums, need, starts, effort, with_stages if advises else None)
        seconds = MemoryLimited(seconds, need, float(seconds.values(starts[0][None])[0]))
    incumbents = Incumbents(seconds, need.fits, 1 + alternatives)
    bound = search_cuts(incumbents, space, starts, effort)
    return _solution(incumbents, bound, sums.segments, makespan, need, resolved, objective)


def _solution(
    incumbents: Incumbents,
    bound: float,
    segments: int,
    makespan: Makespan,
    memory: MemoryNeed,
    schedule: Schedule,
    objective: str,
) -> Solution:
    alternatives = []
    for cuts, value in incumbents.ranked:
        array = np.array(cuts, np.int64)
        if objective == "makespan":  # which rounds differently from the simulator
            value = simulate(schedule, makespan.times_of(array)).makespan
        rank_bytes = np.ceil(memory.of_ranks(array[None])[:, 0])
        alternatives.append(Alternative(cuts, value, tuple(int(size) for size in rank_bytes)))
    best, *next_best = sorted(alternatives, key=lambda alternative: alternative.value)
    array = np.array(best.cuts, np.int64)
    return Solution(
        best.cuts,
        best.value,
        best.memory,
        best.value if bound >= best.value * (1 - EQUAL) else bound,
        tuple(next_best),
        _moved(incumbents, array, segments),
        schedule,
        makespan.times_of(array),
    )


def _moved(incumbents: Incumbents, cuts: Integers, segments: int) -> tuple[tuple[float, float], ...]:
    """Return for each cut the values with it one segment earlier, and one later."""
    step = np.eye(len(cuts), dtype=np.int64)
    shifted_cuts = np.concatenate([cuts - step, cuts + step])
    possible = has_no_empty_stage(shifted_cuts, segments)
    values = np.full(len(shifted_cuts), np.inf)
    values[possible] = np.where(incumbents.fit(shifted_cuts[possible]), incumbents.add(shifted_cuts[possible]), np.inf)
    return tuple(zip(values[: len(cuts)].tolist(), values[len(cuts) :].tolist(), strict=True))


class MemoryShortage(PlanError):
    """No cuts fit into the memory.

    Attributes:
        peak: bytes that the fullest rank needs for ``cuts``.
        cuts: those that need the least.
    """

    def __init__(self, problem: str, peak: int, cuts: Sequence[int] = (), advice: str = "") -> None:
        super().__init__(problem, advice)
        self.peak, self.cuts = peak, tuple(cuts)


def _starts_that_fit(
    sums: PrefixSums,
    memory: MemoryNeed,
    starts: Sequence[Integers],
    effort: float,
    memory_of: Callable[[int], MemoryNeed] | None,
) -> list[Integers]:
    """Return the starts and, if none of them fits, the cuts that need the least memory.

    ``memory_of`` returns the need of the same schedule with another number of stages; it raises ScheduleError or
    PlanError if the schedule cannot have that number. Without ``memory_of``, a MemoryShortage does not say how much
    memory other numbers of stages need. Raises a MemoryShortage that says how much memory would be enough if the cuts
    that need the least memory do not fit.
    """
    if any(memory.fits(start[None])[0] for start in starts):
        return list(starts)
    cuts, peak, bound = _least_memory(sums, memory, effort)
    if peak <= memory.limit:
        return [*starts, cuts]
    lines = [
        _sufficient_memory(memory, peak, bound),
        _parts_of_need(memory, cuts),
        *(_with_more_stages(sums, memory, effort, memory_of) if memory_of is not None else ()),
    ]
    raise MemoryShortage("\n".join(lines), math.ceil(peak), cuts.tolist())


def _least_memory(sums: PrefixSums, memory: MemoryNeed, effort: float) -> tuple[Integers, float, float]:
    """Return (the cuts that need the least memory, what they need, a lower bound of what any cuts need)."""
    incumbents = Incumbents(memory, lambda cuts: np.ones(len(cuts), bool), capacity=1)
    starts = [equal_parts(sums, memory.stages, [quantity]) for quantity in (STATE, SAVED)]
    bound = search_cuts(incumbents, CutSpace.all_cuts(sums.segments, memory.stages), starts, effort)
    return incumbents.best_cuts, incumbents.best_value, bound


def _sufficient_memory(memory: MemoryNeed, peak: float, bound: float) -> str:
    proved = bound >= peak * (1 - EQUAL)
    low, high = min(memory.limits), memory.limit
    room, base, suffix = f"{format_bytes(high)} on each rank", 0.0, ""
    if low < high:
        room, base, suffix = f"{format_bytes(low)} to {format_bytes(high)} on a rank", high, " more on each"
    least, floor = math.ceil(peak - base), math.floor(bound - base)
    return (
        f"No cuts{'' if proved else ' that were found'} fit into {room}: {format_bytes(least)} ({least} bytes){suffix} "
        f"would be enough, {'and no less' if proved else f'and less than {format_bytes(floor)}{suffix} would not'}."
    )


def _parts_of_need(memory: MemoryNeed, cuts: Integers) -> str:
    state, saved, buffers, transient = (part[:, 0] for part in memory.parts(cuts[None]))
    rank = memory.fullest(cuts)
    return (
        f"Of that, rank {rank} needs {format_bytes(state[rank])} for parameters, buffers, gradients and optimizer "
        f"state, {format_bytes(saved[rank])} for saved activations, which recompute or smaller microbatches make less, "
        f"{format_bytes(buffers[rank])} for receive buffers, and {format_bytes(transient[rank])} while F, I or W runs."
    )


def _with_more_stages(
    sums: PrefixSums, memory: MemoryNeed, effort: float, memory_of: Callable[[int], MemoryNeed]
) -> list[str]:
    """Return a line on the memory that two times the number of stages need, four times, and so on until they fit."""
    needs: list[str] = []
    for doubled in range(1, _DOUBLINGS + 1):
        stages = memory.stages << doubled
        if stages > sums.segments:
            break
        try:
            larger = memory_of(stages)
        except (ScheduleError, PlanError):
            break
        peak = _least_memory(sums, larger, _EFFORT_SHARE * effort)[1]
        needs.append(f"with {stages} stages on {larger.ranks} ranks it is {format_bytes(peak)}")
        if peak <= memory.limit:
            break
    return [f"The least on a rank depends on their number: {', '.join(needs)}."] if needs else []
