"""Where to cut a chain of segments into stages, with a proof of how good that is, and advice if nothing fits.

A `Problem` has several options for each stage; ``solve`` is for the plain case of a single one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from pipegraph.cost import ONCE, MemoryFactors, SegmentCost
from pipegraph.errors import PlanError, ScheduleError, nearest
from pipegraph.planner.solver.cut_search import equal_parts, even_start, search, search_steps
from pipegraph.planner.solver.cut_space import CutSpace, StageFigures
from pipegraph.planner.solver.linear_program import FractionalStages
from pipegraph.planner.solver.local_search import (
    EQUAL,
    Incumbents,
    Moves,
    has_no_empty_stage,
    hill_climb,
    iterated_local_search,
)
from pipegraph.planner.solver.makespan import Links, Makespan
from pipegraph.planner.solver.memory_need import MemoryNeed
from pipegraph.planner.solver.objective import MemoryLimited, Objective, SlowestStage
from pipegraph.planner.solver.prefix_sums import PARAMETERS, SAVED, TIMES, Booleans, Integers, PrefixSums, split
from pipegraph.planner.solver.solve_arguments import (
    check_costs,
    check_numbers,
    check_stages,
    memory_of_ranks,
    memory_text,
    resolve_schedule,
)
from pipegraph.schedule import Schedule, Times, simulate
from pipegraph.units import format_bytes

OBJECTIVES = "makespan", "bottleneck"

_EFFORT_SHARE = 0.1  # of the effort, to find the least memory with several options or for another number of stages
_DOUBLINGS = 3  # of the number of stages
_CLIMBED = 30_000_000  # steps after which a climb that proves nothing stops: about a second
_UNIFORM_EFFORT = 0.2  # part of the effort for the best cuts with one option for all stages


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
        options: the option of each stage.
        uniform: the best value that was found with one of several options for all stages; infinite if none was.
        schedule: the schedule that the cuts are for. `simulate` shows a step of it with these ``times``.
        times: seconds of stages and boundaries.
    """

    lower_bound: float
    alternatives: tuple[Alternative, ...]
    moved: tuple[tuple[float, float], ...]
    options: tuple[int, ...] = field(repr=False)
    uniform: float = field(repr=False)
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
    factors: MemoryFactors = ONCE,
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
        factors: how many times a rank holds parameters, gradients and the optimizer's state. By default each once;
            without a backward, parameters alone.
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
    check_numbers(effort, receives_ahead, alternatives)
    if objective not in OBJECTIVES:
        raise PlanError(
            f'There is no objective "{objective}".{nearest(str(objective), OBJECTIVES)} '
            f"The objectives are {' and '.join(OBJECTIVES)}."
        )
    resolved = resolve_schedule(schedule, stages, microbatches, placement, ranks)

    def schedule_of(stages: int) -> Schedule:
        return resolve_schedule(schedule, stages, microbatches, None, stages // (resolved.stages // resolved.ranks))

    problem = Problem([costs], resolved, memory_bytes, link, None, factors, receives_ahead, objective)
    return problem.solve(effort=effort, alternatives=alternatives, schedule_of=schedule_of if advises else None)


class Problem:
    """The cuts of a chain for a schedule, and one of several options for each stage.

    An option is what a stage's backward computes again, say: it changes what segments take and keep. If there are few
    possible candidates, all are simulated. Otherwise they are searched for from the best cuts with one option for all
    stages. Stages of parts of segments bound the rest from below (`FractionalStages`), and so does branch and bound
    over the cuts where the effort is enough for it: for given weights, the best option of each stage at each place
    follows from a table, and dynamic programming puts stages together. A stage has an option only where its rank has
    room for it, which early stages of 1F1B, with more microbatches in flight, have for fewer.

    Source: AdaPipe (Sun et al., ASPLOS 2024) chooses cuts and recomputation together by dynamic programming over a
    closed form of 1F1B's time. Here every schedule is simulated.
    """

    def __init__(
        self,
        options: Sequence[Sequence[SegmentCost]],
        schedule: Schedule,
        memory_bytes: float | str | Sequence[float | str] | None = None,
        link: Links | None = None,
        allowed: Sequence[Sequence[int]] | None = None,
        factors: MemoryFactors = ONCE,
        receives_ahead: int = 4,
        objective: str = "makespan",
    ) -> None:
        """The arguments are as for `solve`, but costs and numbers are not checked.

        Args:
            options: the costs of the segments with each option. What crosses between segments is the same in all.
            schedule: one without transfers.
            allowed: the options that each stage may have; by default all.

        Raises:
            PlanError: fewer segments than stages.
        """
        check_stages(len(options[0]), schedule.stages)
        self._schedule, self._link, self._objective = schedule, link, objective
        self._order = sorted(range(len(options)), key=lambda index: -sum(cost.saved_bytes for cost in options[index]))
        self._options = [options[number] for number in self._order]  # the leanest last
        self._allowed = _allowed_options(allowed, schedule.stages, self._order)
        self._sums = PrefixSums(*self._options)
        self._moves = Moves(self._sums.segments, self._allowed)
        limits = memory_of_ranks(memory_bytes, schedule.ranks)
        self._need = partial(MemoryNeed, self._sums, factors=factors, receives_ahead=receives_ahead)
        self._memory = self._need(schedule, limits=limits)
        self._with_options = partial(
            Problem, schedule=schedule, memory_bytes=memory_bytes, link=link, factors=factors,
            receives_ahead=receives_ahead, objective=objective,
        )  # fmt: skip

    @cached_property
    def _every(self) -> CutSpace:
        return CutSpace.all_cuts(self._sums.segments, self._schedule.stages, self._allowed)

    @cached_property
    def _space(self) -> CutSpace:
        """The candidates of which each stage fits its rank, if the rank holds nothing else."""
        return self._every.restrict(self._memory.allows) if self._memory.limits else self._every

    @cached_property
    def _places(self) -> CutSpace:
        """The cuts of these."""
        return self._space.without_options()

    @cached_property
    def _makespan(self) -> Makespan:
        return Makespan(self._sums, self._schedule, self._link)

    @cached_property
    def _value(self) -> Objective:
        """What is minimized, whatever memory it takes."""
        if self._objective == "makespan":
            return self._makespan
        return SlowestStage(self._sums, self._schedule.stages, self._schedule.trains)

    @cached_property
    def _stage_values(self) -> StageFigures:
        """The least value, by what a stage is."""
        return StageFigures(self._value.stage_bound, self._space)

    @property
    def is_impossible(self) -> bool:
        """Whether some stage fits nowhere, with any option."""
        return self._space.empty

    @cached_property
    def lower_bound(self) -> float:
        """No cuts and options have a smaller value, which the slowest stage of the most even cuts shows; infinite if
        nothing fits."""
        return math.inf if self.is_impossible else self._places.cheapest(self._stage_values, np.maximum)[0]

    def fractional_bound(self, enough: float = math.inf) -> float:
        """Return what no cuts and options go below, which stages of parts of segments show; infinite if nothing fits.
        It is not made tighter than ``enough``."""
        return self._fractional_stages.least_makespan(enough)

    @property
    def may_fit(self) -> bool:
        """Whether stages of parts of segments fit into the memory. If not, whole segments do not."""
        return self._fractional_stages.fit()

    @cached_property
    def _fractional_stages(self) -> FractionalStages:
        return FractionalStages(self._options, self._allowed, self._makespan, self._memory)

    def solve(
        self,
        uniform: Sequence[int] | None = None,
        effort: float = 1.0,
        advises: bool = True,
        proves: bool = True,
        initial_solution: Solution | None = None,
        alternatives: int = 0,
        schedule_of: Callable[[int], Schedule] | None = None,
    ) -> Solution:
        """Return the best that was found.

        Args:
            uniform: the options with which one for all stages is tried; by default all.
            effort: scales how long the search continues. 1 is about ten seconds with several options.
            advises: whether a `MemoryShortage` says how much memory would be enough, which takes long to find.
            proves: otherwise cuts and options are only improved step by step, and the lower bound is the slowest
                stage's.
            initial_solution: something that fits, where the search begins alone.
            schedule_of: returns the schedule with another number of stages, for the advice of a `MemoryShortage`; it
                raises ScheduleError or PlanError if the schedule cannot have that number.

        Raises:
            MemoryShortage: nothing fits.
        """
        memory, has_options, best_uniform = self._memory, len(self._options) > 1, math.inf
        if not advises and initial_solution is None and self.is_impossible:
            subject = "cuts and choices" if has_options else "cuts"
            raise MemoryShortage(f"No {subject} fit into {memory_text(memory.limits)}.", 0)
        if initial_solution is not None:
            starts = [self._candidate(initial_solution)]
        elif not has_options:
            starts = self._even_cuts()
        else:
            starts, best_uniform = self._uniform_starts(uniform, effort) if proves else ([], math.inf)
            if not starts and not self.is_impossible:
                placement = self._schedule.placement
                starts = [
                    even_start(
                        self._places, self._sums, self._makespan, self._stage_values, memory, self._allowed, placement
                    )
                ]
        if not any(memory.fits(start[None])[0] for start in starts):
            starts.append(self._least_memory(starts, effort, proves, schedule_of))
        objective = self._value
        if memory.limits:
            objective = MemoryLimited(objective, memory, float(objective.values(starts[0][None])[0]))
        incumbents = Incumbents(objective, memory.fits, 1 + alternatives)
        if proves:
            outer_bound = self.fractional_bound if has_options else lambda enough: 0.0
            bound = search(incumbents, self._moves, self._space, starts, effort, outer_bound)
        else:
            bound = self.lower_bound
            for start in starts:  # the last one may be the only one that fits
                hill_climb(incumbents, self._moves, start, incumbents.spent + _CLIMBED)
            iterated_local_search(incumbents, self._moves, int(effort * search_steps(len(self._options))))
        return self._solution(incumbents, bound, best_uniform)

    def _even_cuts(self) -> list[Integers]:
        """Return cuts into equal parts and, if memory is limited, those whose stages fit alone and whose slowest stage
        is the fastest."""
        starts = [equal_parts(self._sums, self._schedule.stages, TIMES if self._schedule.trains else TIMES[:1])]
        if self._memory.limits and not self._space.empty:
            starts.append(self._places.cheapest(self._stage_values, np.maximum)[1])
        return starts

    def _solution(self, incumbents: Incumbents, bound: float, uniform: float) -> Solution:
        candidates = []
        for candidate, value in incumbents.ranked:
            array = np.array(candidate, np.int64)
            if self._objective == "makespan":  # which rounds differently from the simulator
                value = simulate(self._schedule, self._makespan.times_of(array)).makespan
            candidates.append((value, array))
        (value, best), *next_best = sorted(candidates, key=lambda candidate: candidate[0])
        cuts, options = split(best[None], len(self._options))
        return Solution(
            cuts=tuple(cuts[0].tolist()),
            value=value,
            memory=self._memory_of(best),
            options=tuple(self._order[number] for number in options[0].tolist()),
            lower_bound=value if bound >= value * (1 - EQUAL) else bound,
            alternatives=tuple(
                Alternative(tuple(candidate[: self._schedule.stages - 1].tolist()), value, self._memory_of(candidate))
                for value, candidate in next_best
            ),
            moved=self._moved(incumbents, best),
            uniform=uniform,
            schedule=self._schedule,
            times=self._makespan.times_of(best),
        )

    def _moved(self, incumbents: Incumbents, best: Integers) -> tuple[tuple[float, float], ...]:
        """Return for each cut the values with it one segment earlier, and one later."""
        cuts = self._schedule.stages - 1
        step = np.eye(cuts, len(best), dtype=np.int64)
        shifted = np.concatenate([best - step, best + step])
        possible = has_no_empty_stage(shifted[:, :cuts], self._sums.segments)
        values = np.full(len(shifted), np.inf)
        values[possible] = np.where(incumbents.fit(shifted[possible]), incumbents.add(shifted[possible]), np.inf)
        return tuple(zip(values[:cuts].tolist(), values[cuts:].tolist(), strict=True))

    def _least_memory(
        self,
        starts: Sequence[Integers],
        effort: float,
        proves: bool,
        schedule_of: Callable[[int], Schedule] | None,
    ) -> Integers:
        """Return the candidate that needs the least memory. Raises a MemoryShortage if it does not fit."""
        memory = self._memory
        if len(self._options) == 1:
            cuts, peak, bound = _least_memory(self._sums, self._moves, memory, effort)
            if peak <= memory.limit:
                return cuts
            lines = [_sufficient_memory(memory, peak, bound), _parts_of_need(memory, cuts)]
            if schedule_of is not None:
                lines += self._with_more_stages(schedule_of, effort)
            raise MemoryShortage("\n".join(lines), math.ceil(peak), cuts.tolist())
        leanest = [int(np.flatnonzero(row)[-1]) for row in self._allowed]
        incumbents = Incumbents(memory, lambda candidates: np.ones(len(candidates), bool), capacity=1)
        for start in (*starts, np.append(equal_parts(self._sums, memory.stages, [PARAMETERS, SAVED]), leanest)):
            hill_climb(incumbents, self._moves, start, np.inf if proves else _CLIMBED)
        iterated_local_search(incumbents, self._moves, int(_EFFORT_SHARE * effort * search_steps(len(self._options))))
        peak_bytes = math.ceil(incumbents.best_value)
        if peak_bytes > memory.limit:
            least, suffix = _least_and_suffix(memory, incumbents.best_value)
            raise MemoryShortage(
                f"No cuts and choices that were found fit into {memory_text(memory.limits)}: {format_bytes(least)} "
                f"({least} bytes){suffix} would be enough.",
                peak_bytes,
                incumbents.best_cuts[: memory.stages - 1].tolist(),
                f"{'that much more' if suffix else 'that much'} memory, or more ranks.",
            )
        return incumbents.best_cuts

    def _with_more_stages(self, schedule_of: Callable[[int], Schedule], effort: float) -> list[str]:
        """Return a line on the memory that two times the number of stages need, four times, and so on until they
        fit."""
        needs: list[str] = []
        for doubled in range(1, _DOUBLINGS + 1):
            stages = self._schedule.stages << doubled
            if stages > self._sums.segments:
                break
            try:
                larger = self._need(schedule_of(stages))
            except (ScheduleError, PlanError):
                break
            moves = Moves(self._sums.segments, np.ones((stages, 1), bool))
            peak = _least_memory(self._sums, moves, larger, _EFFORT_SHARE * effort)[1]
            needs.append(f"with {stages} stages on {larger.ranks} ranks it is {format_bytes(peak)}")
            if peak <= self._memory.limit:
                break
        return [f"The least on a rank depends on their number: {', '.join(needs)}."] if needs else []

    def take(self, solution: Solution) -> Solution | None:
        """Return what was found for these stages with other ``factors`` or other limits, with the memory that it
        needs here; None if that is too much."""
        candidate = self._candidate(solution)
        return replace(solution, memory=self._memory_of(candidate)) if self._memory.fits(candidate[None])[0] else None

    def _candidate(self, solution: Solution) -> Integers:
        options = map(self._order.index, solution.options) if len(self._options) > 1 else ()
        return np.array([*solution.cuts, *options], np.int64)

    def _memory_of(self, candidate: Integers) -> tuple[int, ...]:
        """Return the bytes that each rank needs with a candidate (numbers,)."""
        return tuple(math.ceil(rank_bytes) for rank_bytes in self._memory.of_ranks(candidate[None])[:, 0].tolist())

    def _uniform_starts(self, uniform: Sequence[int] | None, effort: float) -> tuple[list[Integers], float]:
        """Return the best cuts with each of these options for all stages, as candidates, and the best value."""
        chosen = range(len(self._options)) if uniform is None else sorted(map(self._order.index, uniform))
        starts, best = [], math.inf
        for option in chosen:
            if not self._allowed[:, option].all():
                continue
            try:
                problem = self._with_options([self._options[option]])
                solution = problem.solve(effort=_UNIFORM_EFFORT * effort, advises=False)
            except MemoryShortage:
                continue
            starts.append(np.array([*solution.cuts, *[option] * self._schedule.stages], np.int64))
            best = min(best, solution.value)
        return starts, best


def _allowed_options(allowed: Sequence[Sequence[int]] | None, stages: int, order: Sequence[int]) -> Booleans:
    """Return which options each stage may have: a row for each stage, a column for each option in this order."""
    may = np.full((stages, len(order)), allowed is None)
    for stage, chosen in enumerate(allowed or ()):
        may[stage, [order.index(option) for option in chosen]] = True
    return may


class MemoryShortage(PlanError):
    """No cuts fit into the memory.

    Attributes:
        peak: bytes that the fullest rank needs for ``cuts``.
        cuts: those that need the least.
    """

    def __init__(self, problem: str, peak: int, cuts: Sequence[int] = (), advice: str = "") -> None:
        super().__init__(problem, advice)
        self.peak, self.cuts = peak, tuple(cuts)


def _least_memory(sums: PrefixSums, moves: Moves, memory: MemoryNeed, effort: float) -> tuple[Integers, float, float]:
    """Return (the cuts that need the least memory, what they need, a lower bound of what any cuts need)."""
    incumbents = Incumbents(memory, lambda cuts: np.ones(len(cuts), bool), capacity=1)
    starts = [equal_parts(sums, memory.stages, [quantity]) for quantity in (PARAMETERS, SAVED)]
    bound = search(incumbents, moves, CutSpace.all_cuts(sums.segments, memory.stages), starts, effort)
    return incumbents.best_cuts, incumbents.best_value, bound


def _least_and_suffix(memory: MemoryNeed, peak: float) -> tuple[int, str]:
    """Return the bytes that would be enough; those that are missing on each rank, which the suffix says, if ranks have
    unequal memory."""
    is_equal = min(memory.limits) == memory.limit
    return (math.ceil(peak), "") if is_equal else (math.ceil(peak - memory.limit), " more on each")


def _sufficient_memory(memory: MemoryNeed, peak: float, bound: float) -> str:
    proved = bound >= peak * (1 - EQUAL)
    least, suffix = _least_and_suffix(memory, peak)
    floor = format_bytes(math.floor(bound - memory.limit if suffix else bound))
    return (
        f"No cuts{'' if proved else ' that were found'} fit into {memory_text(memory.limits)}: {format_bytes(least)} "
        f"({least} bytes){suffix} would be enough, "
        f"{'and no less' if proved else f'and less than {floor}{suffix} would not'}."
    )


def _parts_of_need(memory: MemoryNeed, cuts: Integers) -> str:
    rank = memory.fullest(cuts)
    *state, saved, buffers, transient = (float(part[rank, 0]) for part in memory.parts(cuts[None]))
    return (
        f"Of that, rank {rank} needs {format_bytes(sum(state))} for parameters, buffers, gradients and optimizer "
        f"state, {format_bytes(saved)} for saved activations, which recompute or smaller microbatches make less, "
        f"{format_bytes(buffers)} for receive buffers, and {format_bytes(transient)} while F, I or W runs."
    )
