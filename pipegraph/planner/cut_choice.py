"""Cuts of a priced chain, searched for or given, with what they are expected to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pipegraph.graph.partition.split_points import Point
from pipegraph.package.prediction import Cut, Prediction, ShiftedCut, StagePrediction
from pipegraph.planner.plan_options import Aim
from pipegraph.planner.priced_model import Costs
from pipegraph.planner.solver.memory_shortage import MemoryShortage
from pipegraph.planner.solver.search.even_cuts import evenest
from pipegraph.planner.solver.solve import Solution
from pipegraph.planner.step_estimate import memory_of, seconds_of, times_of
from pipegraph.schedule import Schedule
from pipegraph.units import bytes_option, format_bytes

_NONE_FITS = "No cuts that were found fit into the memory, with what several stages hold"
_TRIES = 4
_BETTER = 1e-4  # part of a value: what is better by less is as good


@dataclass(frozen=True)
class Choice:
    """Cuts, the segments that start a stage, with what they take: exactly, stage by stage.

    Attributes:
        value: seconds of a step or, where no time is balanced, the largest stage.
        solution: how they were found; None where they were given.
    """

    costs: Costs = field(repr=False)
    aim: Aim = field(repr=False)
    cuts: tuple[int, ...]
    schedule: Schedule = field(repr=False)
    value: float
    solution: Solution | None = field(repr=False)

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Bytes that each rank needs."""
        return memory_of(self.costs.stages(self.cuts), self.schedule, self.aim.state_factor)

    @property
    def per_microbatch(self) -> float:
        return self.value / self.schedule.microbatches

    @property
    def peak(self) -> int:
        """Bytes that the fullest rank needs."""
        return max(self.memory)

    @property
    def fits(self) -> bool:
        """Whether every rank has room."""
        if self.aim.memory_bytes is None:
            return True
        limits = self.aim.limits(self.schedule.ranks)
        return all(needed <= limit for needed, limit in zip(self.memory, limits, strict=True))

    @property
    def points(self) -> tuple[Point, ...]:
        """The split points."""
        return self.costs.priced.chain.points(self.cuts)

    def predict(self) -> Prediction:
        """What these cuts take, and why each is where it is."""
        stages, aim = self.costs.stages(self.cuts), self.aim
        times, chain = times_of(stages, self.schedule, aim.link), self.costs.priced.chain
        figures = zip(times.forward, times.input_grad, times.weight_grad, strict=True)
        bound = None if self.solution is None else rounded(min(self.solution.lower_bound, self.value))
        prediction = Prediction(
            balance=aim.balance,
            recompute=aim.recompute,
            hardware=aim.hardware.name,
            unit=self.costs.priced.unit,
            schedule=self.schedule.name,
            placement=self.schedule.placement,
            microbatches=self.schedule.microbatches,
            value=rounded(self.value),
            places=len(chain.segments) - 1,
            lower_bound=bound,
            memory=self.memory,
            stages=tuple(
                StagePrediction(
                    rounded(f), rounded(i), rounded(w), each.saved_bytes, each.parameter_bytes, each.weight_saved_bytes
                )
                for (f, i, w), each in zip(figures, stages, strict=True)
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
            measured_ratio=aim.hardware.measured_ratio,
        )
        return prediction.with_reasons()

    def moved(self, number: int, step: int) -> Choice | None:
        """The same with a cut so many segments later; None where a stage would be empty."""
        bounds, place = [0, *self.cuts, len(self.costs.segments)], self.cuts[number] + step
        if not bounds[number] < place < bounds[number + 2]:
            return None
        cuts = (*self.cuts[:number], place, *self.cuts[number + 1 :])
        return evaluate(self.costs, self.aim, cuts, self.schedule, self.solution)

    def _shifted(self, number: int, step: int) -> ShiftedCut | None:
        other = self.moved(number, step)
        if other is None:
            return None
        return ShiftedCut(str(other.points[number]), rounded(other.value) if other.fits else None)


def rounded(figure: float) -> float:
    """Round a predicted figure to six digits: what comes behind depends on the order of additions."""
    return float(f"{figure:.6g}")


def choose(costs: Costs, aim: Aim, stages: int) -> Choice:
    """The best cuts into so many stages.

    `solve` adds up segments. Of the cuts that it finds, those are taken whose stages take the least exactly. If none
    fits the memory then, because two stages hold a tied weight, say, what the sum left out is taken from what the ranks
    have, and `solve` is asked again.

    Raises:
        MemoryShortage: no cuts fit.
        PlanError, ScheduleError: as `solve` does.
    """
    room = aim.memory_bytes
    for _ in range(_TRIES):
        try:
            solution = aim.solve(costs, stages, room)
        except MemoryShortage as shortage:
            least = evaluate(costs, aim, shortage.cuts, aim.arrange(stages))
            if least.fits:
                return least
            if room is aim.memory_bytes and least.peak <= shortage.needed:
                raise
            raise _too_full(least, _NONE_FITS, "more stages") from None
        found = [
            evaluate(costs, aim, each.cuts, solution.schedule, solution) for each in (solution, *solution.alternatives)
        ]
        fitting = [choice for choice in found if choice.fits]
        if fitting:
            return _even(min(fitting, key=lambda choice: choice.value), solution)
        figures = zip(aim.limits(solution.schedule.ranks), found[0].memory, solution.memory, strict=True)
        room = [max(0.0, limit - max(0, exact - added)) for limit, exact, added in figures]
    raise _too_full(found[0], _NONE_FITS, "more stages")


def _even(best: Choice, solution: Solution) -> Choice:
    """Where a weight is balanced, the most even of the cuts that are as good."""
    if best.aim.timed:
        return best
    cuts = evenest(best.costs.segments, best.schedule.stages, solution.value)
    even = evaluate(best.costs, best.aim, cuts, best.schedule, solution)
    return even if even.fits and even.value <= best.value else best


def settle(choice: Choice) -> Choice:
    """Move single cuts by a segment for as long as that makes the stages, taken exactly, better."""
    while True:
        nearest = min(_neighbours(choice), key=lambda other: other.value, default=choice)
        if nearest.value >= choice.value * (1 - _BETTER):
            return choice
        choice = nearest


def _neighbours(choice: Choice) -> list[Choice]:
    moved = (choice.moved(number, step) for number in range(len(choice.cuts)) for step in (-1, 1))
    return [other for other in moved if other is not None and other.fits]


def given(costs: Costs, aim: Aim, cuts: Sequence[int], instead: str) -> Choice:
    """Given cuts. Raises MemoryShortage where they do not fit, which says what to do ``instead``."""
    choice = evaluate(costs, aim, tuple(cuts), aim.arrange(len(cuts) + 1))
    if not choice.fits:
        raise _too_full(choice, "These cuts do not fit into the memory", instead)
    return choice


def _too_full(choice: Choice, what: str, instead: str) -> MemoryShortage:
    limits = choice.aim.limits(choice.schedule.ranks)
    rank = max(range(len(limits)), key=lambda rank: choice.memory[rank] - limits[rank])
    return MemoryShortage(
        f"{what}: rank {rank} needs {format_bytes(choice.memory[rank], 2)}, and has {format_bytes(limits[rank], 2)}.\n"
        f"Try: --memory {bytes_option(choice.peak)}, --recompute block, or {instead}.",
        choice.peak,
    )


def evaluate(
    costs: Costs, aim: Aim, cuts: tuple[int, ...], schedule: Schedule, solution: Solution | None = None
) -> Choice:
    """Cuts for a ready schedule, whether they fit or not."""
    return Choice(costs, aim, cuts, schedule, _value(costs, aim, cuts, schedule), solution)


def _value(costs: Costs, aim: Aim, cuts: Sequence[int], schedule: Schedule) -> float:
    stages = costs.stages(cuts)
    if aim.timed:
        return seconds_of(stages, schedule, aim.link)
    return max(each.forward + each.input_grad + each.weight_grad for each in stages)
