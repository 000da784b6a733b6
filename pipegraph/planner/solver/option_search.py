"""``solve_options``: where to cut a chain, and which of several options each stage has, found together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, islice, product
from math import comb
from random import Random

import numpy as np

from pipegraph.cost import SegmentCost
from pipegraph.planner.solver.branch_and_bound import BranchAndBound
from pipegraph.planner.solver.cut_search import equal_parts, largest_stage
from pipegraph.planner.solver.cut_space import CutSpace, StageCosts, StageFigures
from pipegraph.planner.solver.linear_program import LinearProgram
from pipegraph.planner.solver.local_search import (
    EQUAL,
    Incumbents,
    Moves,
    has_no_empty_stage,
    hill_climb,
    iterated_local_search,
    moved_at_random,
    neighbours,
)
from pipegraph.planner.solver.makespan import Links, Makespan
from pipegraph.planner.solver.memory_need import MemoryNeed
from pipegraph.planner.solver.objective import MemoryLimited, Objective
from pipegraph.planner.solver.prefix_sums import (
    SAVED,
    STATE,
    TIMES,
    Booleans,
    Floats,
    Integers,
    LinearBound,
    quantities_of,
)
from pipegraph.planner.solver.solve import MemoryShortage, solve
from pipegraph.planner.solver.solve_arguments import check_numbers, check_options, memory_of_ranks, resolve_schedule
from pipegraph.planner.solver.stage_options import OptionBound, OptionFits, OptionMakespan, OptionSpace, OptionSums
from pipegraph.schedule import Schedule, simulate
from pipegraph.units import format_bytes

# ---- fractional stages -----------------------------------------------------------------------------------------------
# A lower bound for all cuts and options of a chain: stages of any parts of its segments, by linear programming.


_ROUNDS = 24  # of solving the program, then adding linear bounds that its solution exceeds
_ROWS = 16  # of the linear bounds that are exceeded the most, which a round adds
_EXCEEDS = 1e-3  # part of a bound
_EXACT = 1e-6  # of the solution of a linear program


class FractionalStages:
    """Stages that may have any parts of any segments, each part with any option that some stage may have.

    Cuts and options are one way to fill them, so none takes less than the fastest way. As a makespan, and what a rank
    needs, is the largest of linear bounds, a linear program finds it. Segments that have the same costs to choose from
    are one variable for each stage and cost. The first segment is in the first stage, and the last one in the last.

    Args:
        options: the costs of the segments with each option.
        makespan, memory: of stages with these options.
    """

    def __init__(self, options: Sequence[Sequence[SegmentCost]], makespan: Makespan, memory: MemoryNeed) -> None:
        self._makespan, self._memory = makespan, memory
        kinds: dict[tuple[str, frozenset[tuple[float, ...]]], list[int]] = {}
        for number, costs in enumerate(zip(*options, strict=True)):
            place = {0: "first", len(options[0]) - 1: "last"}.get(number, "between")
            kinds.setdefault((place, frozenset(map(quantities_of, costs))), []).append(number)
        every = range(memory.stages)
        stages = {"first": every[:1], "between": every, "last": every[-1:]}
        self._counts = np.array([len(numbers) for numbers in kinds.values()])
        choices = [
            (kind, stage, cost)
            for kind, (place, costs) in enumerate(kinds)
            for stage in stages[place]
            for cost in sorted(costs)
        ]
        self._kinds, self._stage, costs_of = (np.array(column) for column in zip(*choices, strict=True))
        self._costs: Floats = costs_of.T  # (quantities, variables)

    def least_makespan(self, enough: float = math.inf) -> float:
        """Return seconds that no cuts and options go below; infinite if none fit. It is not made tighter than
        ``enough``."""
        variables, limit = len(self._kinds), self._memory.limit
        pool, constants = self._table([*self._makespan.initial_bounds(), *self._makespan.path_bounds()])
        even = self._counts[self._kinds] / np.bincount(self._kinds)[self._kinds]
        scale = float((pool @ even + constants).max())  # so that no figure is far from 1
        if not scale:
            return 0.0
        program = LinearProgram()
        program.add_variables(np.append(np.zeros(variables), 1.0), np.zeros((0, variables + 1)))
        parts = np.arange(len(self._counts))[:, None] == np.append(self._kinds, -1)
        program.add_rows(parts.astype(np.float64), self._counts, self._counts)

        def add(table: Floats, makespan: float, most: Floats) -> None:
            """Add rows ``table`` @ shares + ``makespan`` × the makespan, the last variable, ≤ ``most``."""
            if len(table):
                rows = np.column_stack([table, np.full(len(table), makespan)])
                program.add_rows(rows / scale, np.full(len(table), -np.inf), most / scale)

        add(pool[: self._memory.ranks], -scale, -constants[: self._memory.ranks])
        least = 0.0
        for _ in range(_ROUNDS):
            try:
                solution = program.solve()
            except ArithmeticError:
                break
            if solution is None:
                return math.inf
            least, shares = scale * float(solution.values[-1]), solution.values[:-1]
            if least >= enough:
                break
            stages = self._stages_of(shares)
            values = pool @ shares + constants
            longest = np.argsort(-values)[:_ROWS]
            longest = longest[values[longest] > least * (1 + _EXCEEDS)]
            new_rows, more_constants = pool[longest], constants[longest]
            if not len(longest):
                new_rows, more_constants = self._table([self._makespan.longest_path(stages)])
                slower = new_rows @ shares + more_constants > least * (1 + _EXCEEDS)
                new_rows, more_constants = new_rows[slower], more_constants[slower]
            needs, need_constants = self._table(self._memory.tightest_bounds(stages))
            short = needs @ shares + need_constants > limit * (1 + _EXCEEDS)
            if not len(new_rows) and not short.any():
                break
            full = scale / limit
            add(new_rows, -scale, -more_constants)
            add(full * needs[short], 0.0, scale - full * need_constants[short])
        return least * (1 - _EXACT)

    def _table(self, bounds: Sequence[LinearBound | OptionBound]) -> tuple[Floats, Floats]:
        """Return what each variable adds to linear bounds, and their constants: (bounds, variables), (bounds,)."""
        rows = []
        for bound in bounds:
            assert isinstance(bound, OptionBound)  # the sums have options
            rows.append(np.einsum("qv,qv->v", bound.weights[:, self._stage], self._costs))
        return np.array(rows), np.array([bound.constant for bound in bounds])

    def _stages_of(self, shares: Floats) -> Floats:
        """Return the quantities of stages: (quantities, stages)."""
        return np.array([np.bincount(self._stage, row, self._memory.stages) for row in self._costs * shares])


# ---- option start ----------------------------------------------------------------------------------------------------
# The candidate that a search begins with: even cuts, with the fastest options that ranks have room for.


_TRIED = 6  # limits of what a stage may need


def even_start(
    space: OptionSpace,
    sums: OptionSums,
    makespan: Makespan,
    seconds: StageCosts,
    memory: MemoryNeed,
    allowed: Booleans,
    placement: Sequence[int],
) -> Integers:
    """Return even cuts, with the fastest options that ranks have room for: a candidate that fits, if one was found.

    Even cuts are those of which the slowest stage is the fastest. They may leave a rank with stages that need much
    memory, and so with slow options or none. So stages that need more than a part of the memory are left out, of which
    several are tried.

    Args:
        space: the cuts of which each stage fits its rank with some option, if the rank holds nothing else.
        seconds: of a step at least, by what a stage is.
        allowed: the options that stages may have: (stages, options).
        placement: the rank of each stage.
    """
    bytes_needed = StageFigures(memory.stage_bound, space)
    most = [memory.limit]
    if memory.limits:
        fullest = largest_stage(memory, space.cheapest(bytes_needed, np.maximum), sums.segments)
        most = np.linspace(fullest * (1 + EQUAL), memory.limit, _TRIED).tolist()
    starts = []
    for limit in most:
        narrow = space.restrict(lambda *stage, limit=limit: bytes_needed(*stage) <= limit)
        cuts = narrow.cheapest(seconds, np.maximum)
        starts.append(_fastest_options(cuts, sums, memory, allowed, np.array(placement)))
    candidates = np.unique(starts, axis=0)
    missing = (memory.values(candidates) - memory.limit).clip(min=0.0)
    best: Integers = candidates[np.lexsort((makespan.values(candidates), missing))[0]]
    return best


def _fastest_options(
    cuts: Integers, sums: OptionSums, memory: MemoryNeed, allowed: Booleans, placement: Integers
) -> Integers:
    """Return these cuts with the options with which each rank computes for the shortest time, of those that fit into
    its memory; those that need the least on a rank where none fit.

    What a rank needs depends on its own stages alone, so all ranks try options at once. A rank's first stages have one
    option and the others another, since those that come first keep the most microbatches.
    """
    ranks, stages = memory.ranks, len(placement)
    passed: Counter[int] = Counter()
    place = np.zeros(stages, np.int64)  # among the stages of its rank
    for stage, rank in enumerate(placement.tolist()):
        place[stage] = passed[rank]
        passed[rank] += 1
    first, then, change = (
        grid.reshape(-1, 1) for grid in np.indices((sums.options, sums.options, max(passed.values())))
    )
    tried = np.unique(np.where(place <= change, first, then), axis=0)  # (candidates, stages)
    candidates = np.column_stack([np.tile(cuts, (len(tried), 1)), tried])
    holds = np.arange(ranks)[:, None] == placement
    seconds = holds @ sums.stages(candidates)[list(TIMES)].sum(axis=0)  # (ranks, candidates)
    required_bytes = memory.of_ranks(candidates)
    forbidden = holds @ ~allowed[np.arange(stages), tried].T
    seconds[forbidden | (required_bytes > np.array(memory.limits or [np.inf])[:, None])] = np.inf
    required_bytes[forbidden] = np.inf
    chosen = np.where(np.isfinite(seconds).any(axis=1), seconds.argmin(axis=1), required_bytes.argmin(axis=1))
    return np.append(cuts, tried[chosen[placement], np.arange(stages)])


# ---- option moves ----------------------------------------------------------------------------------------------------
# What a search for cuts and options tries: every candidate, neighbours of one, and some random moves away.


_BATCH = 4096
_CLOSE = 3  # options next to a stage's own, in order of what they keep, that are tried together with a moved cut


def every_candidate(segments: int, may: Booleans) -> list[Integers]:
    """Return all candidates, in batches (candidates, numbers)."""
    choices = product(*(np.flatnonzero(row).tolist() for row in may))
    rows = ((*cuts, *chosen) for chosen in choices for cuts in combinations(range(1, segments), len(may) - 1))
    batches = []
    while batch := list(islice(rows, _BATCH)):
        batches.append(np.array(batch, np.int64))
    return batches


def option_moves(may: Booleans) -> Moves:
    """Return moves of cuts, of the options of single stages, and of a cut with the options of a stage next to it."""
    stages = len(may)

    def near(candidate: Integers, segments: int) -> Integers:
        cuts, chosen = candidate[: stages - 1], candidate[stages - 1 :]
        moved = neighbours(cuts, segments)
        rows = [np.column_stack([moved, np.tile(chosen, (len(moved), 1))])]
        stage, option = np.nonzero(may)
        changed = np.tile(candidate, (len(stage), 1))
        changed[np.arange(len(stage)), stages - 1 + stage] = option
        rows.append(changed[option != chosen[stage]])
        close = np.abs(option - chosen[stage]) <= _CLOSE
        for side in (0, 1):  # the cut before the stage, and the one after it
            cut = stage - 1 + side
            inside = close & (cut >= 0) & (cut < stages - 1) & (option != chosen[stage])
            for step in (-1, 1):
                candidates = changed[inside].copy()
                candidates[np.arange(len(candidates)), cut[inside]] += step
                rows.append(candidates[has_no_empty_stage(candidates[:, : stages - 1], segments)])
        every: Integers = np.concatenate(rows)
        return every

    def at_random(random: Random, candidate: Integers, segments: int) -> Integers:
        moved = candidate.copy()
        if stages > 1:
            moved[: stages - 1] = moved_at_random(random, candidate[: stages - 1], segments)
        stage = random.randrange(stages)
        moved[stages - 1 + stage] = random.choice(np.flatnonzero(may[stage]).tolist())
        return moved

    return Moves(near, at_random)


# ---- option search ---------------------------------------------------------------------------------------------------


_ALL_STEPS = 10_000_000  # if valuing all candidates takes fewer steps, all are valued
_STEPS = 240_000_000  # of any other search with an effort of 1: about ten seconds
_BRANCHED, _SEARCHED = 0.4, 0.7  # the parts of these after which branch and bound, then local search, stop
_RELAXED = 10  # times the effort that branch and bound may take for a relaxation of all cuts; what is left is smaller
_CLIMBED = 60_000_000  # steps after which a climb that proves nothing stops: one or two seconds
_UNIFORM_EFFORT = 0.2  # part of the effort for the best cuts with one option for all stages


@dataclass(frozen=True)
class OptionSolution:
    """The best cuts and options that `solve_options` found.

    Attributes:
        cuts: the segments that start a stage, without the first stage's 0.
        options: the option of each stage.
        value: seconds of a step.
        memory: bytes that each rank needs.
        lower_bound: no cuts and options have a smaller value. It equals the value if these are proved to be the best.
        uniform: the best value that was found with one option for all stages; infinite if none fits.
        schedule: what they are for.
    """

    cuts: tuple[int, ...]
    options: tuple[int, ...]
    value: float
    memory: tuple[int, ...]
    lower_bound: float
    uniform: float
    schedule: Schedule = field(repr=False)

    @property
    def gap(self) -> float:
        """The part of the value by which others can be better, at most."""
        return 1 - self.lower_bound / self.value if self.value > 0 else 0.0


def solve_options(
    options: Sequence[Sequence[SegmentCost]],
    stages: int,
    schedule: str | Schedule = "1f1b",
    microbatches: int = 8,
    ranks: int | None = None,
    memory_bytes: float | str | Sequence[float | str] | None = None,
    link: Links | None = None,
    *,
    allowed: Sequence[Sequence[int]] | None = None,
    uniform: Sequence[int] | None = None,
    state_factor: float = 4.0,
    receives_ahead: int = 4,
    effort: float = 1.0,
    names: Sequence[str] | None = None,
    advises: bool = True,
) -> OptionSolution:
    """Choose where to cut a chain of segments, and an option for each stage, for the least time of a step.

    An option is what a stage's backward computes again, say: it changes what segments take and keep. If there are few
    possible candidates, all are simulated. Otherwise they are searched for from the best cuts with one option for all
    stages. Stages of parts of segments bound the rest from below (`FractionalStages`), and so does branch and bound
    over the cuts where the effort is enough for it: for given weights, the best option of each stage at each place
    follows from a table, and dynamic programming puts stages together. A stage has an option only where its rank has
    room for it, which early stages of 1F1B, with more microbatches in flight, have for fewer.

    Source: AdaPipe (Sun et al., ASPLOS 2024) chooses cuts and recomputation together by dynamic programming over a
    closed form of 1F1B's time. Here every schedule is simulated.

    Args:
        options: the costs of the segments with each option. What crosses between segments is the same in all.
        stages, schedule, microbatches, ranks, memory_bytes, link, state_factor, receives_ahead, names: as for `solve`.
        allowed: the options that each stage may have; by default all.
        uniform: the options with which one for all stages is tried; by default all.
        effort: scales how long the search continues. 1 is about ten seconds.
        advises: as for `solve`.

    Raises:
        PlanError: as `solve` does; or options that do not fit together; a `MemoryShortage` if nothing fits.
        ScheduleError: as `solve` does.
    """
    check_options(options, stages, names, allowed)
    check_numbers(state_factor, effort, receives_ahead)
    resolved = resolve_schedule(schedule, stages, microbatches, None, ranks)
    problem = OptionProblem(options, resolved, memory_bytes, link, allowed, state_factor, receives_ahead)
    return problem.solve(uniform, effort, advises)


class OptionProblem:
    """The cuts and options of a chain for a schedule: what `solve_options` chooses from.

    The arguments are as there, but not checked, and the schedule has no transfers.
    """

    def __init__(
        self,
        options: Sequence[Sequence[SegmentCost]],
        schedule: Schedule,
        memory_bytes: float | str | Sequence[float | str] | None = None,
        link: Links | None = None,
        allowed: Sequence[Sequence[int]] | None = None,
        state_factor: float = 4.0,
        receives_ahead: int = 4,
    ) -> None:
        self._schedule, stages = schedule, schedule.stages
        self._order = sorted(range(len(options)), key=lambda index: -sum(cost.saved_bytes for cost in options[index]))
        self._options = [options[number] for number in self._order]  # the leanest last
        self._allowed = _allowed_options(allowed, stages, self._order)
        self._sums = OptionSums(self._options, stages)
        self._solve = partial(
            solve, stages=stages, schedule=self._schedule, memory_bytes=memory_bytes, link=link,
            state_factor=state_factor, receives_ahead=receives_ahead, alternatives=0, advises=False,
        )  # fmt: skip
        need = partial(MemoryNeed, state_factor=state_factor, receives_ahead=receives_ahead)
        limits = memory_of_ranks(memory_bytes, self._schedule.ranks)
        # With the least that any option needs of each segment.
        self._memory = need(self._sums, self._schedule, limits=limits)
        self._link = link
        self._need_of = [partial(need, sums, self._schedule, limits=limits) for sums in self._sums.by_option]

    @cached_property
    def _every(self) -> CutSpace:
        return CutSpace.all_cuts(self._sums.segments, self._schedule.stages)

    @cached_property
    def _space(self) -> OptionSpace:
        """All cuts, with the options that fit."""
        fits = OptionFits([need() for need in self._need_of], self._allowed, self._every)
        return OptionSpace(self._every.first, self._every.last, self._every.allowed, fits)

    @cached_property
    def _possible(self) -> OptionSpace:
        """The cuts of which each stage fits its rank with some option, if the rank holds nothing else."""
        return self._space.restrict(self._space.fits.any)

    @cached_property
    def _makespan(self) -> OptionMakespan:
        return OptionMakespan(self._sums, self._schedule, self._link, lambda: self._space.fits)

    @cached_property
    def _seconds(self) -> StageFigures:
        """What a step takes at least, by what a stage is."""
        return StageFigures(self._makespan.stage_bound, self._possible)

    @cached_property
    def is_impossible(self) -> bool:
        """Whether some stage fits nowhere, with any option."""
        return self._every.restrict(self._memory.allows).empty or self._possible.empty

    @cached_property
    def lower_bound(self) -> float:
        """No cuts and options have a smaller value, which the slowest stage of the most even cuts shows; infinite if
        nothing fits."""
        if self.is_impossible:
            return math.inf
        cuts = self._possible.cheapest(self._seconds, np.maximum)
        return largest_stage(self._makespan, cuts, self._sums.segments)

    def fractional_bound(self, enough: float = math.inf) -> float:
        """Return what no cuts and options go below, which stages of parts of segments show; infinite if nothing fits.
        It is not made tighter than ``enough``."""
        makespan = Makespan(self._sums, self._schedule, self._link)
        used = [costs for costs, may in zip(self._options, self._allowed.T, strict=True) if may.any()]
        return FractionalStages(used, makespan, self._memory).least_makespan(enough)

    def solve(
        self,
        uniform: Sequence[int] | None = None,
        effort: float = 1.0,
        advises: bool = True,
        proves: bool = True,
        initial_solution: OptionSolution | None = None,
    ) -> OptionSolution:
        """Return the best that was found. Raises as `solve_options` does.

        Without ``proves``, cuts and options are only improved step by step, and the lower bound is the slowest stage's.
        With something ``initial_solution`` that fits, the search begins there alone.
        """
        memory, sums, makespan = self._memory, self._sums, self._makespan
        if not advises and initial_solution is None and self.is_impossible:
            raise MemoryShortage(f"No cuts and choices fit into {format_bytes(memory.limit)} on each rank.", 0)
        moves = option_moves(self._allowed)
        starts, best_uniform = [] if initial_solution is None else [self._candidate(initial_solution)], math.inf
        if proves and not starts:
            starts, best_uniform = self._uniform_starts(uniform, effort)
        if not starts and not self._possible.empty:
            placement = self._schedule.placement
            starts = [even_start(self._possible, sums, makespan, self._seconds, memory, self._allowed, placement)]
        if not any(memory.fits(start[None])[0] for start in starts):
            starts.append(self._least_memory(starts, moves, effort, np.inf if proves else _CLIMBED))
        seconds: Objective = makespan
        if memory.limits:
            seconds = MemoryLimited(makespan, memory, float(makespan.values(starts[0][None])[0]))
        incumbents = Incumbents(seconds, memory.fits, capacity=1)
        if proves:
            bound = self._search(incumbents, starts, effort, moves)
        else:
            bound = self.lower_bound
            for start in starts:  # the last one may be the only one that fits
                hill_climb(incumbents, start, sums.segments, moves, incumbents.spent + _CLIMBED)
            iterated_local_search(incumbents, incumbents.best_cuts, sums.segments, int(effort * _STEPS), moves)
        best = incumbents.best_cuts
        value = simulate(self._schedule, makespan.times_of(best)).makespan  # rounds differently from the objective
        places, options_of = sums.split(best[None])
        return OptionSolution(
            tuple(places[0].tolist()),
            tuple(self._order[number] for number in options_of[0].tolist()),
            value,
            self._memory_of(best[None]),
            value if bound >= value * (1 - EQUAL) else bound,
            best_uniform,
            self._schedule,
        )

    def _least_memory(self, starts: Sequence[Integers], moves: Moves, effort: float, until: float) -> Integers:
        """Return the cuts and options that need the least memory, found from these. Raises a MemoryShortage if they do
        not fit."""
        memory, segments = self._memory, self._sums.segments
        leanest = [int(np.flatnonzero(row)[-1]) for row in self._allowed]
        incumbents = Incumbents(memory, lambda candidates: np.ones(len(candidates), bool), capacity=1)
        for start in (*starts, np.array([*equal_parts(self._sums, memory.stages, [STATE, SAVED]), *leanest], np.int64)):
            hill_climb(incumbents, start, segments, moves, until)
        iterated_local_search(incumbents, incumbents.best_cuts, segments, int(0.1 * effort * _STEPS), moves)
        peak = math.ceil(incumbents.best_value)
        if peak > memory.limit:
            raise MemoryShortage(
                f"No cuts and choices that were found fit into {format_bytes(memory.limit)} on each rank: "
                f"{format_bytes(peak)} ({peak} bytes) would be enough.",
                peak,
                incumbents.best_cuts[: memory.stages - 1].tolist(),
            )
        return incumbents.best_cuts

    def _search(self, incumbents: Incumbents, starts: Sequence[Integers], effort: float, moves: Moves) -> float:
        """Find the best candidates, and return a lower bound of their value. As `search_cuts` does for cuts.

        Branch and bound is left out where the effort is not enough for one relaxation; the fractional bound remains.
        """
        objective, segments, stages = incumbents.objective, self._sums.segments, self._schedule.stages
        for start in starts:
            hill_climb(incumbents, start, segments, moves)
        choices = math.prod(self._allowed.sum(axis=1).tolist())
        if comb(segments - 1, stages - 1) * choices * objective.steps <= _ALL_STEPS:
            for batch in every_candidate(segments, self._allowed):
                incumbents.add(batch)
            return incumbents.best_value
        steps, bound = int(effort * _STEPS), self.fractional_bound(incumbents.target)
        places = sum(mask.size for mask in self._every.allowed)
        if bound >= incumbents.target:
            return incumbents.best_value
        if stages * self._sums.options * places > _RELAXED * steps:
            iterated_local_search(incumbents, incumbents.best_cuts, segments, int(_SEARCHED * steps), moves)
            return min(bound, incumbents.best_value)
        subspace = self._space.restrict(lambda *stage: objective.stage_bound(*stage) < incumbents.target)
        if subspace.empty:
            return incumbents.best_value
        slowest = largest_stage(objective, subspace.cheapest(objective.stage_bound, np.maximum), segments)
        tree = BranchAndBound(incumbents, subspace, incumbents.best_cuts, max(bound, slowest), moves)
        tree.run(int(_BRANCHED * steps))
        if tree.bound < incumbents.best_value:
            iterated_local_search(incumbents, incumbents.best_cuts, segments, int(_SEARCHED * steps), moves)
            tree.run(steps)
        return tree.bound

    def take(self, solution: OptionSolution) -> OptionSolution | None:
        """Return what was found for these stages with another ``state_factor`` or other limits, with the memory that it
        needs here; None if that is too much."""
        candidate = self._candidate(solution)[None]
        return replace(solution, memory=self._memory_of(candidate)) if self._memory.fits(candidate)[0] else None

    def _candidate(self, solution: OptionSolution) -> Integers:
        return np.array([*solution.cuts, *map(self._order.index, solution.options)], np.int64)

    def _memory_of(self, candidate: Integers) -> tuple[int, ...]:
        """Return the bytes that each rank needs with a candidate (1, numbers)."""
        return tuple(math.ceil(rank_bytes) for rank_bytes in self._memory.of_ranks(candidate)[:, 0].tolist())

    def _uniform_starts(self, uniform: Sequence[int] | None, effort: float) -> tuple[list[Integers], float]:
        """Return the best cuts with each of these options for all stages, as candidates, and the best value."""
        chosen = range(len(self._options)) if uniform is None else sorted(map(self._order.index, uniform))
        starts, best = [], math.inf
        for option in chosen:
            if not self._allowed[:, option].all():
                continue
            try:
                solution = self._solve(self._options[option], effort=_UNIFORM_EFFORT * effort)
            except MemoryShortage:
                continue
            starts.append(np.array([*solution.cuts, *[option] * (len(solution.cuts) + 1)], np.int64))
            best = min(best, solution.value)
        return starts, best


def _allowed_options(allowed: Sequence[Sequence[int]] | None, stages: int, order: Sequence[int]) -> Booleans:
    """Return which options each stage may have: a row for each stage, a column for each option in this order."""
    may = np.full((stages, len(order)), allowed is None)
    for stage, chosen in enumerate(allowed or ()):
        may[stage, [order.index(option) for option in chosen]] = True
    return may
