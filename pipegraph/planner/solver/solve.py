"""``solve``: where to cut a chain of segments into stages, and how good that is for certain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pipegraph.cost import SegmentCost
from pipegraph.errors import PlanError, nearest
from pipegraph.planner.solver.memory_shortage import fitting
from pipegraph.planner.solver.objectives.boundary_times import Crossings, Link, LinkOf
from pipegraph.planner.solver.objectives.makespan import Makespan
from pipegraph.planner.solver.objectives.memory_need import Memory
from pipegraph.planner.solver.objectives.objective import Limited, Objective, SlowestStage
from pipegraph.planner.solver.prefix_sums import TIMES, Integers, Sums
from pipegraph.planner.solver.search.cut_search import even_cuts, search
from pipegraph.planner.solver.search.cut_space import Space
from pipegraph.planner.solver.search.incumbents import EQUAL, Pool
from pipegraph.planner.solver.search.local_search import apart
from pipegraph.planner.solver.solve_arguments import byte_limits, check_costs, check_numbers
from pipegraph.planner.solver.stage_schedule import arrange
from pipegraph.schedule import Schedule, Times, simulate

OBJECTIVES = "makespan", "bottleneck"


@dataclass(frozen=True)
class Alternative:
    """Cuts with their value, and the bytes that each rank needs."""

    cuts: tuple[int, ...]
    value: float
    memory: tuple[int, ...]


@dataclass(frozen=True)
class Solution(Alternative):
    """The best cuts that `solve` found: the segments that start a stage, without the first stage's 0.

    Attributes:
        value: seconds: of a step or, with the objective "bottleneck", of the slowest stage for one microbatch.
        lower_bound: no cuts have less. It is the value where the cuts are proved to be the best.
        alternatives: the next best that came up, by value.
        moved: of each cut, the value if it lay one segment earlier, and one later; infinite where it cannot.
        schedule: what the cuts are for. `simulate` shows a step of it with these ``times``.
        times: seconds of stages and boundaries.
    """

    lower_bound: float
    alternatives: tuple[Alternative, ...]
    moved: tuple[tuple[float, float], ...]
    schedule: Schedule = field(repr=False)
    times: Times = field(repr=False)

    @property
    def gap(self) -> float:
        """The part of the value by which other cuts can be better at most: 0 where these are proved to be the best."""
        return 1 - self.lower_bound / self.value if self.value > 0 else 0.0


def solve(
    costs: Sequence[SegmentCost],
    stages: int,
    schedule: str | Schedule = "1f1b",
    microbatches: int = 8,
    placement: str | None = None,
    ranks: int | None = None,
    objective: str = "makespan",
    memory_bytes: float | Sequence[float] | None = None,
    link: Link | LinkOf | None = None,
    *,
    state_factor: float = 4.0,
    receives_ahead: int = 4,
    alternatives: int = 5,
    effort: float = 1.0,
    names: Sequence[str] | None = None,
) -> Solution:
    """Choose where to cut a chain of segments.

    Few cuts are all simulated. Of many the best are searched for, and a bound says how much better any others can be.
    The same arguments give the same result.

    Args:
        costs: of each segment, for one microbatch.
        stages: how many to make.
        schedule: a name that `pipegraph.schedule.build` knows, or a ready schedule.
        microbatches: of a step; a ready schedule has its own.
        placement: "loop" or "v". It follows from the schedule: what is given is compared.
        ranks: likewise, but for schedules that can have any number of stages on a rank.
        objective: "makespan", seconds of a step as `simulate` has them, or "bottleneck", seconds that the slowest stage
            computes for one microbatch.
        memory_bytes: what each rank has: one figure, or one for each rank. What is kept between actions has to fit:
            activations, parameters, buffers, gradients, optimizer state, and receive buffers; not what a kernel needs
            while it runs.
        link: (latency in seconds, bandwidth in bytes per second) between ranks, or what gives it for (rank, other
            rank). Without one, crossing a boundary takes no time.
        state_factor: how many times a rank holds parameters that have a gradient: 4 for parameters, gradients and the
            two moments of AdamW. Frozen ones, and without a backward all, it holds once.
        receives_ahead: how many receives a rank posts before the schedule reaches them.
        alternatives: how many others to return, at most.
        effort: scales how long the search goes on. 1 is a few seconds.
        names: of the segments, for messages.

    Raises:
        PlanError: fewer segments than stages, or arguments that are none or do not fit together; a `MemoryShortage`
            where no cuts fit into the memory.
        ScheduleError: a schedule that is not known, cannot have these numbers, or is wrong.
    """
    check_costs(costs, stages, names)
    check_numbers(state_factor, receives_ahead, alternatives, effort)
    if objective not in OBJECTIVES:
        raise PlanError(
            f'There is no objective "{objective}".{nearest(str(objective), OBJECTIVES)} '
            f"The objectives are {' and '.join(OBJECTIVES)}."
        )
    sums, arranged = Sums(costs), arrange(schedule, stages, microbatches, placement, ranks)
    memory_of = partial(Memory, sums, state_factor=state_factor, receives_ahead=receives_ahead)
    memory = memory_of(arranged, limits=byte_limits(memory_bytes, arranged.ranks))
    makespan = Makespan(sums, arranged, Crossings.of(link, arranged.placement))
    seconds: Objective = makespan
    if objective == "bottleneck":
        seconds = SlowestStage(sums, stages, arranged.trains)
    space = Space.every(sums.segments, stages)
    starts = [even_cuts(sums, stages, TIMES if arranged.trains else TIMES[:1])]
    if memory.limits:
        space = space.where(memory.allows)

        def of_more(stages: int) -> Memory:
            ranks = stages // (arranged.stages // arranged.ranks)
            return memory_of(arrange(schedule, stages, microbatches, None, ranks))

        starts = fitting(sums, memory, starts, effort, of_more)
        seconds = Limited(seconds, memory, float(seconds.values(starts[0][None])[0]))
    pool = Pool(seconds, memory.fits, 1 + alternatives)
    bound = search(pool, space, starts, effort)
    return _solution(pool, bound, sums.segments, makespan, memory, arranged, objective)


def _solution(
    pool: Pool, bound: float, segments: int, makespan: Makespan, memory: Memory, schedule: Schedule, objective: str
) -> Solution:
    found = []
    for cuts, value in pool.ranked:
        array = np.array(cuts, np.int64)
        if objective == "makespan":  # the word of the simulator is the last
            value = simulate(schedule, makespan.simulated(array)).makespan
        needed = np.ceil(memory.of_ranks(array[None])[:, 0])
        found.append(Alternative(cuts, value, tuple(int(one) for one in needed)))
    best, *others = sorted(found, key=lambda one: one.value)
    array = np.array(best.cuts, np.int64)
    return Solution(
        best.cuts,
        best.value,
        best.memory,
        best.value if bound >= best.value * (1 - EQUAL) else bound,
        tuple(others),
        _moved(pool, array, segments),
        schedule,
        makespan.simulated(array),
    )


def _moved(pool: Pool, cuts: Integers, segments: int) -> tuple[tuple[float, float], ...]:
    """Of each cut, the values of the cuts with it one segment earlier, and later."""
    step = np.eye(len(cuts), dtype=np.int64)
    both = np.concatenate([cuts - step, cuts + step])
    possible = apart(both, segments)
    values = np.full(len(both), np.inf)
    values[possible] = np.where(pool.fit(both[possible]), pool.add(both[possible]), np.inf)
    return tuple(zip(values[: len(cuts)].tolist(), values[len(cuts) :].tolist(), strict=True))
