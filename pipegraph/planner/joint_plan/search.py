"""The search for the best joint plan: bounds first, then the cuts and choices of the most promising candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from heapq import heapify, heappop, heappush

from pipegraph.arguments import argument
from pipegraph.cost.hardware import Link
from pipegraph.errors import PlanError
from pipegraph.planner.joint_plan.choices import JointCandidate, JointChoice, JointComparison, Neighbour, pareto_front
from pipegraph.planner.joint_plan.layout import Layout, layouts
from pipegraph.planner.joint_plan.layout_costs import LayoutCosts, exposed_seconds, resident_seconds
from pipegraph.planner.plan_options import StagedCosts
from pipegraph.planner.solver.option_search import OptionProblem, OptionSolution, solve_options
from pipegraph.planner.solver.solve import MemoryShortage
from pipegraph.planner.solver.solve_arguments import resolve_schedule
from pipegraph.planner.step_prediction import stage_times, step_seconds
from pipegraph.progress import report_progress
from pipegraph.schedule import Kind, Schedule, build
from pipegraph.schedule.recipes import find_recipe
from pipegraph.units import bytes_option, format_bytes

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v")
"""The schedules that are compared by default."""

_FEW_LAYERS = 32  # of a model of fewer, all cuts are looked at for every candidate
_LOW_EFFORT = 0.02  # for every candidate that its bound does not rule out
_MOST_ACTIONS = 60_000  # of a step; a candidate with more is no better than one with more rows
_KEPT_PROBLEMS = 4  # of candidates whose bound was made tighter, and whose turn may come soon
_ROWS = (1, 2, 4, 8)  # times the rows of the example


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
        self._problems: dict[tuple[JointCandidate, bool], OptionProblem] = {}
        self._slowest: dict[tuple[int, int, str, int, int], float] = {}

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
        bounds = {candidate: self.bound(candidate) for candidate in self.candidates if self._may_fit(candidate)}
        found: list[JointChoice] = []
        for whole in (True, False) if len(self._costs.layers) >= _FEW_LAYERS else (False,):
            if not found:
                self._search_all(bounds, whole)
                found = [choice for choice in self._found.values() if choice is not None]
        if not found:
            raise self._shortage([*bounds] or self.candidates)
        fastest = min(found, key=lambda choice: choice.step)
        final = self.search(fastest.candidate, self._effort, whole=False)
        assert final is not None
        found = [final if choice is fastest else choice for choice in found]
        searched = len(self._found)
        left = (bound for candidate, bound in bounds.items() if candidate not in self._found)
        bound = min([final.step, *left, *(choice.lower_bound for choice in found)])
        neighbours = tuple(self._neighbours(final.candidate))
        return JointComparison(pareto_front(found), len(self.candidates), searched, bound, neighbours)

    def _search_all(self, bounds: Mapping[JointCandidate, float], whole: bool) -> None:
        """Search the candidates in the order of what they take at least, until that is as much as the best one takes.

        Of a model of many layers, the bound of a candidate is made tighter when its turn comes, and it waits for its
        turn again.
        """
        waiting = [(bound, number, candidate, not whole) for number, (candidate, bound) in enumerate(bounds.items())]
        heapify(waiting)
        best = math.inf
        while waiting and waiting[0][0] < best:
            report_progress("comparing plans", len(bounds) - len(waiting), len(bounds))
            bound, number, candidate, is_tight = heappop(waiting)
            if not is_tight:
                slowest = self._slowest_stage(candidate) + self._least_exposed(candidate)
                heappush(waiting, (max(bound, slowest), number, candidate, True))
            else:
                choice = self.search(candidate, whole=whole)
                best = min(best, math.inf if choice is None else choice.step)

    def bound(self, candidate: JointCandidate) -> float:
        """Return seconds that no cuts and choices of a candidate go below: its work, divided between ranks so that all
        of them end together, and the least that can be gathered and reduced."""
        layout, microbatches = candidate.layout, candidate.microbatches
        exposed = self._least_exposed(candidate)
        if candidate.chunks > 1:
            return microbatches * self._costs.totals(layout, candidate.rows).seconds / layout.pp + exposed
        is_whole = _has_whole_backwards(candidate.schedule)
        return self._costs.least_makespan(layout, candidate.rows, microbatches, is_whole) + exposed

    def _slowest_stage(self, candidate: JointCandidate) -> float:
        """Return what a pipeline takes at least that is cut between layers. It is found once for all divisions of its
        copies into dp_replicate × dp_shard: with the one that leaves the most memory."""
        layout = candidate.layout
        key = layout.pp, layout.tp, candidate.schedule, candidate.chunks, candidate.rows
        if key not in self._slowest:
            leanest = replace(
                candidate,
                layout=replace(layout, dp_replicate=1, dp_shard=layout.copies),
                resident=1 if candidate.chunks > 1 and layout.copies > 1 else None,
            )
            self._slowest[key] = self._problem(leanest, whole=True).lower_bound
        return self._slowest[key]

    def _least_exposed(self, candidate: JointCandidate) -> float:
        """Return the least that gathering and reducing can add to a step."""
        layout, totals = candidate.layout, self._costs.totals(candidate.layout, candidate.rows)
        held = totals.parameter_bytes / layout.pp if candidate.chunks == 1 else 0
        return layout.gather_seconds(self._costs.hardware, held) + layout.reduce_seconds(self._costs.hardware, held)

    def search(self, candidate: JointCandidate, effort: float = _LOW_EFFORT, whole: bool = True) -> JointChoice | None:
        """Return a candidate with the best cuts and choices that were found; None if nothing fits.

        With ``whole``, a model of many layers is cut between layers only, if these are enough.
        """
        whole = whole and self._has_enough_layers(candidate)
        hidden = self._costs.hidden(candidate.layout, candidate.rows)
        uniform = [option for option in self._costs.single.uniform if option in hidden]
        try:
            solution = self._problem(candidate, whole).solve(uniform, effort, advises=False)
        except MemoryShortage:
            self._found.setdefault(candidate, None)
            return self._found[candidate]
        if whole:  # other cuts may be better
            cuts = tuple(self._costs.layers[cut] for cut in solution.cuts)
            solution = replace(solution, cuts=cuts, lower_bound=0.0)
        options = self._costs.options(candidate.layout, candidate.rows)
        costs = StagedCosts([options[option] for option in solution.options])
        recompute = tuple(self._costs.recompute[option] for option in solution.options)
        least = max(self.bound(candidate), solution.lower_bound)
        choice = JointChoice(candidate, solution, self._step(candidate, costs, solution), least, recompute, costs)
        before = self._found.get(candidate)
        if before is not None and before.step < choice.step:
            choice = replace(before, lower_bound=max(before.lower_bound, least))
        self._found[candidate] = choice
        return choice

    def _step(self, candidate: JointCandidate, costs: StagedCosts, solution: OptionSolution) -> float:
        """Return the seconds of a step, with what gathering and reducing add."""
        hardware, layout, schedule = self._costs.hardware, candidate.layout, solution.schedule
        staged = costs.stages(solution.cuts)
        links = self.link(layout), hardware.host_link
        value = step_seconds(staged, schedule, *links)
        if candidate.resident is None:
            return value + exposed_seconds(staged, schedule.placement, layout, hardware)
        times = stage_times(staged, schedule, *links)
        return value + resident_seconds(staged, schedule, times, candidate.resident, layout, hardware)

    def _problem(self, candidate: JointCandidate, whole: bool) -> OptionProblem:
        """Return the cuts and choices of a candidate; with ``whole`` between layers only, if these are enough."""
        key = candidate, whole and self._has_enough_layers(candidate)
        if key not in self._problems:
            options, stages = self._costs.options(candidate.layout, candidate.rows), self._stages(candidate)
            hidden = self._costs.hidden(candidate.layout, candidate.rows)
            while len(self._problems) >= _KEPT_PROBLEMS:
                del self._problems[next(iter(self._problems))]
            self._problems[key] = OptionProblem(
                self._costs.layer_options(candidate.layout, candidate.rows)
                if key[1]
                else [costs.segments for costs in options],
                stages,
                self._schedule(candidate),
                memory_bytes=self._memory,
                link=self.link(candidate.layout),
                allowed=None if len(hidden) == len(options) else [hidden] * stages,
                state_factor=candidate.state_factor,
            )
        return self._problems[key]

    def _has_enough_layers(self, candidate: JointCandidate) -> bool:
        return max(_FEW_LAYERS, self._stages(candidate)) <= len(self._costs.layers)

    def link(self, layout: Layout) -> Callable[[int, int], Link]:
        """Return (rank, other rank) of one pipeline → their link."""
        return lambda rank, other: self._costs.hardware.link(rank * layout.stride, other * layout.stride)

    def _schedule(self, candidate: JointCandidate) -> Schedule:
        return _schedule(candidate.schedule, self._stages(candidate), candidate.microbatches, candidate.layout.pp)

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


@cache
def _has_whole_backwards(name: str) -> bool:
    """Whether all backwards of a schedule are B, so that an earlier stage's last one begins when a later one ends."""
    schedule = build(name, 2, 4)
    return all(action.kind in (Kind.F, Kind.B) for row in schedule.actions for action in row)


@lru_cache(maxsize=32)
def _schedule(name: str, stages: int, microbatches: int, ranks: int) -> Schedule:
    """Return a schedule, the same object each time: what is known of it is looked up at once, not compared action by
    action."""
    return resolve_schedule(name, stages, microbatches, None, ranks)
