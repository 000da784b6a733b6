"""Cuts of a priced model, searched for or given, with what they are expected to take."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pipegraph.arguments import argument
from pipegraph.graph.partition.split_points import Point
from pipegraph.package.prediction import UNCORRECTED, Cut, Prediction, RankMemory, ShiftedCut, StagePrediction
from pipegraph.planner.plan_options import ChainCosts, PlanOptions
from pipegraph.planner.solver.cut_search import most_even_cuts
from pipegraph.planner.solver.local_search import Incumbents, Moves, hill_climb
from pipegraph.planner.solver.makespan import Makespan
from pipegraph.planner.solver.prefix_sums import PrefixSums
from pipegraph.planner.solver.solve import MemoryShortage, Solution
from pipegraph.planner.stage_edges import StageEdges, stage_edges
from pipegraph.planner.step_prediction import rank_memory, stage_times, step_seconds, unnamed_order
from pipegraph.recompute import stages_text
from pipegraph.schedule import Schedule
from pipegraph.schedule.branches import NAME as BRANCHES
from pipegraph.schedule.branches import branch_schedules, have_branches
from pipegraph.units import bytes_option, format_bytes

_NONE_FITS = "No cuts that were found fit into the memory, with what several stages hold"
_TRIES = 4
_BETTER = 1e-4  # the part of a value by which cuts must be better to replace others


@dataclass(frozen=True)
class CutChoice:
    """Cuts for a schedule, with exact figures of their stages.

    Attributes:
        cuts: the segments that start a stage.
        solution: how the cuts were found; None if they were given.
        considers_branches: whether ``schedule`` has the edges of stages side by side. Without them every stage waits
            for the one before.
    """

    costs: ChainCosts = field(repr=False)
    options: PlanOptions = field(repr=False)
    cuts: tuple[int, ...]
    schedule: Schedule = field(repr=False)
    solution: Solution | None = field(default=None, repr=False)
    considers_branches: bool = False

    @cached_property
    def value(self) -> float:
        """Seconds of a step or, if no time is balanced, the largest stage."""
        stages = self.costs.stages(self.cuts)
        if self.options.timed:
            return step_seconds(stages, self.schedule, self.options.link, self.options.host_link)
        return max(stage.forward + stage.input_grad + stage.weight_grad for stage in stages)

    @cached_property
    def parts_of_memory(self) -> tuple[RankMemory, ...]:
        """What each rank needs, and for what."""
        return rank_memory(self.costs.stages(self.cuts), self.schedule, self.options.factors)

    @property
    def memory(self) -> tuple[int, ...]:
        """Bytes that each rank needs."""
        return tuple(rank.total for rank in self.parts_of_memory)

    @property
    def per_microbatch(self) -> float:
        return self.value / self.schedule.microbatches

    @property
    def peak(self) -> int:
        """Bytes that the fullest rank needs."""
        return max(self.memory)

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        if self.options.memory_bytes is None:
            return True
        limits = self.options.memory_of_ranks(self.schedule.ranks)
        return all(required_bytes <= limit for required_bytes, limit in zip(self.memory, limits, strict=True))

    @property
    def points(self) -> tuple[Point, ...]:
        """The split points."""
        return self.costs.priced.chain.points(self.cuts)

    def predict(self) -> Prediction:
        """Return the prediction for these cuts, with the reason for the position of each cut."""
        stages, options = self.costs.stages(self.cuts), self.options
        times, chain = stage_times(stages, self.schedule, options.link), self.costs.priced.chain
        figures = zip(times.forward, times.input_grad, times.weight_grad, strict=True)
        is_bounded = self.solution is not None and self.schedule.edges is None  # the bound is that of a chain
        bound = (
            rounded(min(self.solution.lower_bound, self.value)) if self.solution is not None and is_bounded else None
        )
        order = unnamed_order(self.schedule)
        prediction = Prediction(
            balance=options.balance,
            recompute=stages_text(options.recompute if isinstance(options.recompute, tuple) else (options.recompute,)),
            hardware=options.devices.name,
            unit=self.costs.priced.unit,
            schedule=self.schedule.name,
            placement=self.schedule.placement,
            order=order,
            edges=(self.schedule.edges or ()) if order else (),
            microbatches=self.schedule.microbatches,
            value=rounded(self.value),
            places=len(chain.segments) - 1,
            lower_bound=bound,
            memory=self.memory,
            memory_parts=self.parts_of_memory,
            precision=options.training.precision,
            optimizer=options.training.optimizer_text,
            allowance=options.factors.allowance,
            stages=tuple(
                StagePrediction(
                    rounded(f),
                    rounded(i),
                    rounded(w),
                    stage.saved_bytes,
                    stage.parameter_bytes,
                    stage.weight_saved_bytes,
                    stage.offloaded_bytes or None,
                    stage.transient_bytes,
                    stage.added_bytes,
                    stage.trained,
                    stage.optimizer,
                )
                for (f, i, w), stage in zip(figures, stages, strict=True)
            ),
            cuts=tuple(
                Cut(
                    str(chain.segments[cut].point),
                    chain.segments[cut - 1].boundary_bytes,
                    self._shifted(number, -1),
                    self._shifted(number, 1),
                )
                for number, cut in enumerate(self.cuts)
            ),
            measured_ratio=UNCORRECTED if options.rank_profiles else options.hardware.measured_ratio,
        )
        return prediction.with_reasons()

    def shift(self, number: int, step: int) -> CutChoice | None:
        """Return the choice with one cut moved by ``step`` segments; None if a stage would be empty."""
        edges, place = [0, *self.cuts, len(self.costs.segments)], self.cuts[number] + step
        if not edges[number] < place < edges[number + 2]:
            return None
        shifted = replace(self, cuts=(*self.cuts[:number], place, *self.cuts[number + 1 :]))
        return shifted.with_branches() if self.considers_branches else shifted

    def steps(self, number: int) -> list[int]:
        """Return by how many segments to try to move a cut: by one, and to where the nearest branches begin."""
        chain, cut = self.costs.priced.chain, self.cuts[number]
        at = bisect_left(chain.branch_starts, cut) if self.considers_branches else 0
        starts = chain.branch_starts[max(0, at - 1) : at + 2] if self.considers_branches else ()
        return list(dict.fromkeys([-1, 1, *(start - cut for start in starts if start != cut)]))

    def with_branches(self) -> CutChoice:
        """Return the choice in which stages side by side do not wait for each other."""
        edges = stage_edges(self.costs.priced.chain, self.cuts)
        stages = len(self.cuts) + 1
        if not have_branches(stages, edges.values):
            schedule = self.options.schedule_of(stages) if self.schedule.name == BRANCHES else self.schedule
            schedule = schedule.changed(edges=None, gradient_edges=None) if schedule.edges is not None else schedule
        elif self.schedule.name == BRANCHES:
            schedule = min(self._branch_schedules(edges), key=lambda order: self._with_order(order).value)
        else:
            schedule = self.schedule.changed(edges=edges.values, gradient_edges=edges.gradients)
        return replace(self, schedule=schedule, considers_branches=True)

    def branch_orders(self) -> Iterator[CutChoice]:
        """Yield the choice in the orders for stages side by side, one on each rank; nothing without branches."""
        schedule = self.schedule
        if schedule.edges is not None and schedule.trains and schedule.placement == tuple(range(schedule.ranks)):
            edges = stage_edges(self.costs.priced.chain, self.cuts)
            yield from map(self._with_order, self._branch_schedules(edges))

    def _branch_schedules(self, edges: StageEdges) -> Iterator[Schedule]:
        times = stage_times(self.costs.stages(self.cuts), self.schedule, self.options.link)
        return branch_schedules(times, self.schedule.microbatches, *edges)

    def _with_order(self, schedule: Schedule) -> CutChoice:
        return replace(self, schedule=schedule, options=replace(self.options, schedule=schedule), solution=None)

    def _shifted(self, number: int, step: int) -> ShiftedCut | None:
        choice = self.shift(number, step)
        if choice is None:
            return None
        return ShiftedCut(str(choice.points[number]), rounded(choice.value) if choice.fits else None)


def rounded(figure: float) -> float:
    """Round a predicted figure to six digits: the rest depends on the order of additions."""
    return float(f"{figure:.6g}")


def choose_cuts(costs: ChainCosts, options: PlanOptions, stages: int) -> CutChoice:
    """Choose the best cuts into ``stages`` stages.

    `solve` adds up segments. Of the cuts that it finds, those with the best exact value are chosen. If none of them
    fits the memory exactly, for example because two stages hold a tied weight, `solve` is called again with less
    memory.

    Raises:
        MemoryShortage: no cuts fit.
        PlanError, ScheduleError: as `solve` does.
    """
    memory = options.memory_bytes
    for _ in range(_TRIES):
        try:
            solution = options.solve(costs, stages, memory)
        except MemoryShortage as shortage:
            least = _leanest(CutChoice(costs, options, shortage.cuts, options.schedule_of(stages)))
            if least.fits:
                return least
            if memory is options.memory_bytes and least.peak == shortage.peak:
                raise
            raise _shortage(least, _NONE_FITS, "more stages") from None
        choices = [
            CutChoice(costs, options, alternative.cuts, solution.schedule, solution)
            for alternative in (solution, *solution.alternatives)
        ]
        fitting = [choice for choice in choices if choice.fits]
        if fitting:
            return _most_even(min(fitting, key=lambda choice: choice.value), solution)
        limits = options.memory_of_ranks(solution.schedule.ranks)
        figures = zip(limits, choices[0].memory, solution.memory, strict=True)
        memory = [max(0.0, limit - max(0, exact - summed)) for limit, exact, summed in figures]
    raise _shortage(choices[0], _NONE_FITS, "more stages")


def _leanest(choice: CutChoice) -> CutChoice:
    """Move single cuts by a segment for as long as the fullest rank needs less: `solve` chose them by sums over
    segments, and a stage may need less, or, with a tied weight, more."""
    return _moved_while_better(choice, lambda cuts: cuts.peak)


def _moved_while_better(choice: CutChoice, figure: Callable[[CutChoice], float], least_gain: float = 0.0) -> CutChoice:
    """Move single cuts to a segment nearby for as long as that makes a figure smaller, by more than a part of it."""
    while True:
        shifted = (choice.shift(number, step) for number in range(len(choice.cuts)) for step in choice.steps(number))
        best = min((cuts for cuts in shifted if cuts is not None), key=figure, default=choice)
        if figure(best) >= figure(choice) * (1 - least_gain):
            return choice
        choice = best


def _most_even(best: CutChoice, solution: Solution) -> CutChoice:
    """If no time is balanced, return the most even of the cuts that are as good."""
    if best.options.timed:
        return best
    even = replace(best, cuts=most_even_cuts(best.costs.segments, best.schedule.stages, solution.value))
    return even if even.fits and even.value <= best.value else best


def refine_cuts(choice: CutChoice) -> CutChoice:
    """Move single cuts by a segment for as long as that improves the exact value."""
    return _moved_while_better(choice, lambda cuts: cuts.value if cuts.fits else math.inf, _BETTER)


def improve_cuts(choice: CutChoice) -> CutChoice:
    """Return cuts near these from which no small move makes a step shorter, whatever memory they need."""
    segments = choice.costs.segments
    makespan = Makespan(PrefixSums(segments), choice.schedule, choice.options.link)
    incumbents = Incumbents(makespan, lambda cuts: np.ones(len(cuts), bool), capacity=1)
    moves = Moves(len(segments), np.ones((choice.schedule.stages, 1), bool))
    improved, _ = hill_climb(incumbents, moves, np.array(choice.cuts, np.int64))
    return replace(choice, cuts=tuple(improved.tolist()))


def given_cuts(costs: ChainCosts, options: PlanOptions, cuts: Sequence[int], instead: str) -> CutChoice:
    """Return a choice of given cuts. Raises a MemoryShortage with the advice ``instead`` if they do not fit."""
    choice = CutChoice(costs, options, tuple(cuts), options.schedule_of(len(cuts) + 1)).with_branches()
    if not choice.fits:
        raise _shortage(choice, "These cuts do not fit into the memory", instead)
    return choice


def _shortage(choice: CutChoice, cause: str, instead: str) -> MemoryShortage:
    limits = choice.options.memory_of_ranks(choice.schedule.ranks)
    rank = max(range(len(limits)), key=lambda rank: choice.memory[rank] - limits[rank])
    kinds = [f"{format_bytes(size, 2)} {kind}" for kind, size in choice.parts_of_memory[rank].by_kind().items() if size]
    return MemoryShortage(
        f"{cause}: rank {rank} needs {format_bytes(choice.memory[rank], 2)} ({', '.join(kinds)}), and has "
        f"{format_bytes(limits[rank], 2)}.",
        choice.peak,
        advice=f"{argument('memory_bytes', bytes_option(choice.peak))}, "
        f"{argument('recompute', 'block')}, or {instead}.",
    )
