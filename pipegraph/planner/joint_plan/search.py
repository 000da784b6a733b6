"""The search for the best joint plan: bounds first, then the cuts and choices of the most promising candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from pipegraph.arguments import argument
from pipegraph.cost.hardware import Link
from pipegraph.errors import PlanError
from pipegraph.planner.joint_plan.layout import Layout, layouts
from pipegraph.planner.joint_plan.layout_costs import LayoutCosts, exposed_seconds, resident_seconds
from pipegraph.planner.plan_options import StagedCosts
from pipegraph.planner.solver.option_search import OptionSolution, solve_options
from pipegraph.planner.solver.solve import MemoryShortage
from pipegraph.planner.solver.solve_arguments import resolve_schedule
from pipegraph.planner.step_prediction import stage_times, step_seconds
from pipegraph.progress import track
from pipegraph.recompute import Recompute
from pipegraph.schedule import Schedule
from pipegraph.schedule.recipes import find_recipe
from pipegraph.units import bytes_option, format_bytes

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v")
"""The schedules that are compared by default."""

_FEW_LAYERS = 32  # of a model of fewer, all cuts are looked at for every candidate
_LOW_EFFORT = 0.02  # for every candidate that its bound does not rule out
_MOST_ACTIONS = 60_000  # of a step; a candidate with more is no better than one with more rows
_ROWS = (1, 2, 4, 8)  # times the rows of the example


@dataclass(frozen=True)
class JointCandidate:
    """One plan of the space, without its cuts and what is computed again.

    ``resident`` is how many of a rank's ``chunks`` stages are whole at a time, if ranks along dp_shard divide their
    parameters; None for all.
    """

    layout: Layout
    schedule: str
    chunks: int
    rows: int
    microbatches: int
    resident: int | None = None

    @property
    def state_factor(self) -> float:
        """How many times a rank holds the parameters of its stages that have a gradient."""
        resharded = 0.0 if self.resident is None else 1 - self.resident / self.chunks
        return self.layout.state_factor - resharded


@dataclass(frozen=True)
class JointChoice:
    """A candidate with the best cuts and choices that were found.

    Attributes:
        step: seconds, with what gathering parameters and reducing gradients adds.
        lower_bound: no cuts and choices of the candidate have less.
    """

    candidate: JointCandidate
    solution: OptionSolution
    step: float
    lower_bound: float
    recompute: tuple[Recompute, ...]
    costs: StagedCosts = field(repr=False)

    @property
    def peak(self) -> int:
        """Bytes that the fullest rank needs."""
        return max(self.solution.memory)


@dataclass(frozen=True)
class Neighbour:
    """What the best plan would cost with another value of one axis; ``choice`` is None if nothing fits or exists."""

    axis: str
    value: str
    choice: JointChoice | None


@dataclass(frozen=True)
class JointComparison:
    """The plans worth a choice.

    Attributes:
        choices: fastest first: none needs more memory and more time than another one.
        considered: how many candidates the space has.
        searched: for how many cuts were searched; bounds rule out the others.
        lower_bound: no plan of the space takes less.
        neighbours: of the best one.
    """

    choices: tuple[JointChoice, ...]
    considered: int
    searched: int
    lower_bound: float
    neighbours: tuple[Neighbour, ...]

    @property
    def best(self) -> JointChoice:
        """The fastest."""
        return self.choices[0]

    @property
    def gap(self) -> float:
        """The part of the best step by which any plan of the space can be shorter, at most."""
        return max(0.0, 1 - self.lower_bound / self.best.step)


class JointSearch:
    """Searches the plans of a model for a cluster.

    Args:
        costs: the prices of the model.
        devices: how many there are.
        global_batch: rows of a step, over all devices.
        memory_bytes: of a device; None for any.
        schedules: to compare.
        most_tp: the most ranks along tp.
        effort: scales the search for the best plan's cuts.
    """

    def __init__(
        self,
        costs: LayoutCosts,
        devices: int,
        global_batch: int,
        memory_bytes: float | None = None,
        schedules: Sequence[str] = SCHEDULES,
        most_tp: int | None = None,
        effort: float = 1.0,
    ) -> None:
        self._costs, self._of_cluster, self._batch, self._memory = costs, devices, global_batch, memory_bytes
        self._schedules, self._effort = [find_recipe(name) for name in schedules], effort
        node = costs.hardware.links.ranks_per_node
        self._most_tp = min(node, most_tp or node) if costs.shares else 1
        self._found: dict[JointCandidate, JointChoice | None] = {}

    @cached_property
    def candidates(self) -> tuple[JointCandidate, ...]:
        """Every candidate with numbers that are possible."""
        found = []
        for layout in layouts(self._of_cluster, self._costs.segments, self._most_tp):
            for rows in (self._costs.rows * times for times in _ROWS):
                microbatches, rest = divmod(self._batch, layout.copies * rows)
                if not microbatches or rest:
                    continue
                names = {"1f1b": 1} if layout.pp == 1 else {recipe.name: recipe.chunks for recipe in self._schedules}
                for name, chunks in names.items():
                    allowed = not find_recipe(name).rule(layout.pp, microbatches)
                    actions = 3 * layout.pp * chunks * microbatches
                    if allowed and layout.pp * chunks <= self._costs.segments and actions <= _MOST_ACTIONS:
                        each = JointCandidate(layout, name, chunks, rows, microbatches)
                        found += [replace(each, resident=resident) for resident in self._residents(layout, chunks)]
        return tuple(found)

    def _residents(self, layout: Layout, chunks: int) -> list[int | None]:
        """How many stages of a rank may be whole at a time: fewer than all only where that saves memory."""
        fewer = range(1, chunks) if layout.dp_shard > 1 and self._memory is not None else ()
        return [None, *fewer]

    def run(self) -> JointComparison:
        """Search all candidates that their bounds do not rule out.

        Raises:
            PlanError: no candidate has numbers that are possible.
            MemoryShortage: nothing fits.
        """
        if not self.candidates:
            raise PlanError(
                f"No layout of {self._of_cluster} devices divides a batch of {self._batch} rows into microbatches of "
                f"{self._costs.rows}, 2, 4 or 8 times as many.\nTry: {argument('global_batch', self._of_cluster)}."
            )
        bounds = {candidate: self.bound(candidate) for candidate in self.candidates}
        possible = sorted((each for each in bounds if self._may_fit(each)), key=bounds.__getitem__)
        found: list[JointChoice] = []
        for whole in (True, False) if len(self._costs.layers) >= _FEW_LAYERS else (False,):
            best = math.inf
            for candidate in track("comparing plans", possible):
                if not found and bounds[candidate] < best:
                    choice = self.search(candidate, whole=whole)
                    best = min(best, math.inf if choice is None else choice.step)
            found = found or [choice for choice in self._found.values() if choice is not None]
        if not found:
            raise self._shortage(possible or self.candidates)
        fastest = min(found, key=lambda choice: choice.step)
        final = self.search(fastest.candidate, self._effort, whole=False)
        assert final is not None
        found = [final if choice is fastest else choice for choice in found]
        searched = len(self._found)
        left = (bounds[each] for each in possible if each not in self._found)
        bound = min([final.step, *left, *(choice.lower_bound for choice in found)])
        neighbours = tuple(self._neighbours(final.candidate))
        return JointComparison(_front(found), len(self.candidates), searched, bound, neighbours)

    def bound(self, candidate: JointCandidate) -> float:
        """Return seconds that no cuts and choices of a candidate go below: its work, evenly divided between ranks, and
        the least that can be gathered and reduced."""
        totals = self._costs.totals(candidate.layout, candidate.rows)
        layout, stages = candidate.layout, candidate.layout.pp * candidate.chunks
        held = totals.parameter_bytes / stages if candidate.chunks == 1 else 0
        exposed = layout.gather_seconds(self._costs.hardware, held) + layout.reduce_seconds(self._costs.hardware, held)
        return candidate.microbatches * totals.seconds / layout.pp + exposed

    def search(self, candidate: JointCandidate, effort: float = _LOW_EFFORT, whole: bool = True) -> JointChoice | None:
        """Return a candidate with the best cuts and choices that were found; None if nothing fits.

        With ``whole``, a model of many layers is cut between layers only, if these are enough.
        """
        options, stages = self._costs.options(candidate.layout, candidate.rows), self._stages(candidate)
        hidden = self._costs.hidden(candidate.layout, candidate.rows)
        whole = whole and max(_FEW_LAYERS, stages) <= len(self._costs.layers)
        segments = [costs.segments for costs in options]
        try:
            solution = solve_options(
                self._costs.layer_options(candidate.layout, candidate.rows) if whole else segments,
                stages,
                self._schedule(candidate),
                memory_bytes=self._memory,
                link=self.link(candidate.layout),
                allowed=None if len(hidden) == len(options) else [hidden] * stages,
                uniform=[option for option in self._costs.single.uniform if option in hidden],
                state_factor=candidate.state_factor,
                effort=effort,
                advises=False,
            )
        except MemoryShortage:
            self._found.setdefault(candidate, None)
            return self._found[candidate]
        if whole:  # other cuts may be better
            cuts = tuple(self._costs.layers[cut] for cut in solution.cuts)
            solution = replace(solution, cuts=cuts, lower_bound=0.0)
        costs = StagedCosts([options[option] for option in solution.options])
        staged = costs.stages(solution.cuts)
        link, host_link = self.link(candidate.layout), self._costs.hardware.host_link
        value = step_seconds(staged, solution.schedule, link, host_link)
        if candidate.resident is None:
            exposed = exposed_seconds(staged, solution.schedule.placement, candidate.layout, self._costs.hardware)
        else:
            times = stage_times(staged, solution.schedule, link, host_link)
            exposed = resident_seconds(
                staged, solution.schedule, times, candidate.resident, candidate.layout, self._costs.hardware
            )
        recompute = tuple(self._costs.recompute[option] for option in solution.options)
        least = max(self.bound(candidate), solution.lower_bound)
        choice = JointChoice(candidate, solution, value + exposed, least, recompute, costs)
        before = self._found.get(candidate)
        if before is not None and before.step < choice.step:
            choice = replace(before, lower_bound=max(before.lower_bound, least))
        self._found[candidate] = choice
        return choice

    def link(self, layout: Layout) -> Callable[[int, int], Link]:
        """Return (rank, other rank) of one pipeline → their link."""
        return lambda rank, other: self._costs.hardware.link(rank * layout.stride, other * layout.stride)

    def _schedule(self, candidate: JointCandidate) -> Schedule:
        return resolve_schedule(
            candidate.schedule, self._stages(candidate), candidate.microbatches, None, candidate.layout.pp
        )

    @staticmethod
    def _stages(candidate: JointCandidate) -> int:
        return candidate.layout.pp * candidate.chunks

    def _may_fit(self, candidate: JointCandidate) -> bool:
        """Whether the mean over ranks of what they hold at least is no more than the limit: parameters, and what one
        microbatch keeps."""
        if self._memory is None:
            return True
        totals = self._costs.totals(candidate.layout, candidate.rows)
        held = totals.parameter_bytes * candidate.state_factor
        return (held + totals.saved_bytes) / candidate.layout.pp <= self._memory

    def _shortage(self, candidates: Sequence[JointCandidate]) -> MemoryShortage:
        least = math.inf
        for candidate in sorted(candidates, key=lambda each: (-each.layout.pp * each.layout.tp, each.rows))[:3]:
            options = self._costs.options(candidate.layout, candidate.rows)
            try:
                solve_options(
                    [costs.segments for costs in options], candidate.layout.pp * candidate.chunks,
                    self._schedule(candidate), memory_bytes=1.0, uniform=(),
                    state_factor=candidate.state_factor, effort=_LOW_EFFORT,
                )  # fmt: skip
            except MemoryShortage as shortage:
                least = min(least, shortage.needed)
        memory = self._memory or 0.0
        return MemoryShortage(
            f"No plan that was looked at fits into {format_bytes(memory)} on each device; the leanest found needs "
            f"{format_bytes(least)}.\n"
            f"Try: {argument('memory_bytes', bytes_option(math.ceil(least)))}, or more devices.",
            math.ceil(least),
        )

    def _neighbours(self, best: JointCandidate) -> Iterator[Neighbour]:
        """Yield the nearest candidates along each axis. What one dimension of the mesh gains, another one loses."""
        seen = {best}
        for axis, value, candidate in self._steps(best):
            if candidate in seen:
                continue
            seen.add(candidate)
            is_possible = candidate in self.candidates and self._may_fit(candidate)
            known = self._found.get(candidate)
            choice = (known or self.search(candidate)) if is_possible else None
            yield Neighbour(axis, value, choice)

    def _steps(self, best: JointCandidate) -> Iterator[tuple[str, str, JointCandidate]]:
        layout = best.layout
        lengths = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp}
        for more in lengths:
            for less in lengths:
                if more != less and lengths[less] % 2 == 0:
                    changed = {**lengths, more: 2 * lengths[more], less: lengths[less] // 2}
                    other = Layout(**changed)
                    microbatches = self._batch // (other.copies * best.rows)
                    schedule, chunks = ("1f1b", 1) if other.pp == 1 else (best.schedule, best.chunks)
                    resident = best.resident if other.dp_shard > 1 and chunks == best.chunks else None
                    candidate = JointCandidate(other, schedule, chunks, best.rows, microbatches, resident)
                    yield f"{more} × 2", f"{less} ÷ 2", candidate
        for rows in (best.rows * 2, best.rows // 2):
            if rows:
                microbatches = self._batch // (layout.copies * rows)
                yield "rows", str(rows), replace(best, rows=rows, microbatches=microbatches)
        for recipe in self._schedules if layout.pp > 1 else ():
            resident = best.resident if recipe.chunks == best.chunks else None
            yield "schedule", recipe.name, replace(best, schedule=recipe.name, chunks=recipe.chunks, resident=resident)
        for resident in self._residents(layout, best.chunks):
            yield "resident", "all" if resident is None else str(resident), replace(best, resident=resident)


def _front(choices: Sequence[JointChoice]) -> tuple[JointChoice, ...]:
    """Return the choices of which no other one is as fast and needs as little memory, the fastest first."""
    front: list[JointChoice] = []
    for choice in sorted(choices, key=lambda each: (each.step, each.peak)):
        if not front or choice.peak < front[-1].peak:
            front.append(choice)
    return tuple(front)
