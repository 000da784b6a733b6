"""The search for the best joint plan: bounds first, then the cuts and choices of the most promising candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from pipegraph.arguments import argument
from pipegraph.cost import MemoryFactors
from pipegraph.cost.balance import AUTO
from pipegraph.cost.hardware import Link
from pipegraph.cost.model_output import LossOf
from pipegraph.errors import PlanError
from pipegraph.garbage import rare_collection
from pipegraph.graph.captured import Captured
from pipegraph.package.prediction import ShiftedCut
from pipegraph.planner.cut_choice import CutChoice, rounded
from pipegraph.planner.joint_plan.choices import (
    JointCandidate,
    JointChoice,
    JointComparison,
    Layout,
    Neighbour,
    divisors,
    layouts,
    pareto_front,
)
from pipegraph.planner.joint_plan.layout_costs import LayoutCosts, exposed_seconds, resident_seconds, tensor_shares
from pipegraph.planner.plan import Plan, plan
from pipegraph.planner.plan_options import PlanOptions, StagedCosts
from pipegraph.planner.recompute_options import RecomputeOptions
from pipegraph.planner.searched_order import LEAST_GAIN, SEARCHED, activation_limits, searched_schedule
from pipegraph.planner.solver.solve import MemoryShortage, Problem, Solution
from pipegraph.planner.solver.solve_arguments import resolve_schedule
from pipegraph.planner.step_prediction import stage_times, step_seconds
from pipegraph.progress import report_progress
from pipegraph.recompute import OFFLOAD
from pipegraph.schedule import Kind, Schedule, build
from pipegraph.schedule.recipes import compared_names, find_recipe
from pipegraph.units import bytes_option, format_bytes

# ---- candidate problems ----------------------------------------------------------------------------------------------
# What a candidate of a joint plan takes at least, and the cuts and choices that it leaves open.


_FEW_LAYERS = 32  # of a model of fewer, all cuts are looked at for every candidate
FEW_MICROBATCHES = 2
"""Microbatches for each rank, with which a candidate is first looked at: with more of them, ranks hold no less."""
_KEPT_PROBLEMS = 4  # of candidates whose bound was made tighter, and whose turn may come soon


class LeanestDivision(NamedTuple):
    """The division of the copies of a pipeline whose ranks hold the least state.

    ``factors`` are of each part the least of all divisions, if none has the least of everything; else None.
    """

    dp_shard: int
    resident: int | None
    factors: MemoryFactors | None = None


class CandidateProblems:
    """The cuts and choices of candidates, and bounds of what these take.

    Args:
        costs: the prices of the model.
        memory_bytes: of a device; None for any.
        zero1: whether ranks along dp_replicate divide the optimizer's state.
    """

    def __init__(self, costs: LayoutCosts, memory_bytes: float | None, zero1: bool = False) -> None:
        self._costs, self._memory, self._zero1 = costs, memory_bytes, zero1
        self._leanest: dict[tuple[int, int, int], LeanestDivision] = {}
        self._problems: dict[tuple[JointCandidate, bool], Problem] = {}
        self._fractional: dict[JointCandidate, float] = {}
        self._slowest: dict[JointCandidate, float] = {}
        self._fits_with_few: dict[JointCandidate, bool] = {}
        # What is offloaded is away for longer in a schedule of more microbatches.
        self._offloads = any(OFFLOAD in str(choice) for choice in costs.recompute)

    def may_fit(self, candidate: JointCandidate) -> bool:
        """Whether a lower bound of the mean memory of a rank is within the limit: parameters, and the saved values of
        one microbatch."""
        if self._memory is None:
            return True
        totals = self._costs.totals(candidate.layout, candidate.rows)
        return totals.needed_bytes(candidate.factors(self._costs.factors)) / candidate.layout.pp <= self._memory

    def bound(self, candidate: JointCandidate) -> float:
        """Return seconds that no cuts and choices of a candidate go below: its work, divided between ranks so that all
        of them end together, and the least that can be gathered and reduced."""
        if candidate.chunks > 1:
            return self.work_bound(candidate)
        is_whole = _has_whole_backwards(candidate.schedule)
        least = self._costs.least_makespan(candidate.layout, candidate.rows, candidate.microbatches, is_whole)
        return least + self.least_exposed(candidate)

    def work_bound(self, candidate: JointCandidate) -> float:
        """Return seconds that no cuts and choices of a candidate go below, in any order of actions."""
        work = candidate.microbatches * self._costs.totals(candidate.layout, candidate.rows).seconds
        return work / candidate.layout.pp + self.least_exposed(candidate)

    def tight_bound(self, candidate: JointCandidate, enough: float = math.inf) -> float:
        """Return seconds that no cuts and choices of a candidate go below, by stages of parts of segments, however its
        copies are divided. Once found, it stays; it is not made tighter than ``enough``."""
        leanest, exposed = self.leanest(candidate), self.least_exposed(candidate)
        if leanest not in self._fractional and not self._may_fit_with_few(leanest):
            self._fractional[leanest] = math.inf
        if leanest not in self._fractional:
            self._fractional[leanest] = self.problem(leanest, whole_layers=False).fractional_bound(enough - exposed)
        return max(self.bound(candidate), self._fractional[leanest] + exposed)

    def _may_fit_with_few(self, candidate: JointCandidate) -> bool:
        """Whether stages of parts of segments fit into the memory with few microbatches. With more of them ranks hold
        no less, and a longer schedule takes longer to check."""
        pp, few = candidate.layout.pp, FEW_MICROBATCHES * candidate.layout.pp
        is_shorter = few < candidate.microbatches and not find_recipe(candidate.schedule).rule(pp, few)
        if self._memory is None or self._offloads or not is_shorter:
            return True
        key = replace(candidate, microbatches=few)
        if key not in self._fits_with_few:
            schedule = _schedule(key.schedule, key.stages, few, pp)
            # One receive ahead: more may be posted at once at the end of a short schedule than in a long one.
            self._fits_with_few[key] = self.problem_in_order(key, schedule, receives_ahead=1).may_fit
        return self._fits_with_few[key]

    def slowest_stage(self, candidate: JointCandidate) -> float:
        """Return what a pipeline takes at least that is cut between layers, however its copies are divided."""
        leanest = self.leanest(candidate)
        if leanest not in self._slowest:
            self._slowest[leanest] = self.problem(leanest, whole_layers=True).lower_bound
        return self._slowest[leanest]

    def least_exposed(self, candidate: JointCandidate) -> float:
        """Return the least that what the copies exchange can add to a step."""
        layout, totals = candidate.layout, self._costs.totals(candidate.layout, candidate.rows)
        share = 1 / layout.pp if candidate.chunks == 1 else 0
        hardware, gradient_bytes = self._costs.hardware, self._costs.factors.gradients * totals.trained_bytes
        collectives = layout.gather_seconds(hardware, share * totals.parameter_bytes)
        collectives += layout.reduce_seconds(hardware, share * gradient_bytes)
        return collectives + layout.agreement_seconds(hardware)

    def residents(self, layout: Layout, chunks: int) -> list[int | None]:
        """Return how many stages of a rank may be whole at a time: fewer than all only where that saves memory."""
        fewer = range(1, chunks) if layout.dp_shard > 1 and self._memory is not None else ()
        return [None, *fewer]

    def leanest(self, candidate: JointCandidate) -> JointCandidate:
        """Return a candidate that differs in how its copies are divided, and whose ranks hold the least state.

        If that depends on the stage, it holds of each part as little as any other.
        """
        layout = candidate.layout
        key = layout.tp, layout.copies, candidate.chunks
        if key not in self._leanest:
            self._leanest[key] = self._leanest_division(layout, candidate.chunks)
        shard, resident, factors = self._leanest[key]
        return replace(candidate, layout=layout.divided(shard, self._zero1), resident=resident, least_factors=factors)

    def _leanest_division(self, layout: Layout, chunks: int) -> LeanestDivision:
        layouts_of_copies = [layout.divided(shard, self._zero1) for shard in divisors(layout.copies)]
        divisions, factors = [], []
        for division in layouts_of_copies:
            for resident in self.residents(division, chunks):
                divisions.append(LeanestDivision(division.dp_shard, resident))
                factors.append(JointCandidate(division, "", chunks, 1, 1, resident).factors(self._costs.factors))
        state = np.array([self._costs.state_bytes(layout.tp, division_factors) for division_factors in factors])
        best = int(state.sum(axis=1).argmin())
        if (state[best] <= state + 0.5).all():  # bytes
            return divisions[best]
        return divisions[best]._replace(factors=MemoryFactors(*map(min, zip(*factors, strict=True))))

    def problem(self, candidate: JointCandidate, whole_layers: bool) -> Problem:
        """Return the cuts and choices of a candidate; with ``whole_layers`` between layers alone, if these suffice."""
        key = candidate, whole_layers and self.has_enough_layers(candidate)
        if key not in self._problems:
            while len(self._problems) >= _KEPT_PROBLEMS:
                del self._problems[next(iter(self._problems))]
            schedule = _schedule(candidate.schedule, candidate.stages, candidate.microbatches, candidate.layout.pp)
            self._problems[key] = self.problem_in_order(candidate, schedule, key[1])
        return self._problems[key]

    def problem_in_order(
        self, candidate: JointCandidate, schedule: Schedule, whole_layers: bool = False, receives_ahead: int = 4
    ) -> Problem:
        """Return the cuts and choices of a candidate whose actions are in the order of ``schedule``."""
        options = self._costs.options(candidate.layout, candidate.rows)
        hidden = self._costs.hidden(candidate.layout, candidate.rows)
        return Problem(
            self._costs.layer_options(candidate.layout, candidate.rows)
            if whole_layers
            else [costs.segments for costs in options],
            schedule,
            memory_bytes=self._memory,
            link=self.link(candidate.layout),
            allowed=None if len(hidden) == len(options) else [hidden] * candidate.stages,
            factors=candidate.factors(self._costs.factors),
            receives_ahead=receives_ahead,
        )

    @property
    def have_many_layers(self) -> bool:
        """Whether cuts between layers are looked at first."""
        return len(self._costs.layers) >= _FEW_LAYERS

    def has_enough_layers(self, candidate: JointCandidate) -> bool:
        """Whether a candidate can be cut between layers."""
        return self.have_many_layers and candidate.stages <= len(self._costs.layers)

    def link(self, layout: Layout) -> Callable[[int, int], Link]:
        """Return (rank, other rank) of one pipeline → their link."""
        return lambda rank, peer: self._costs.hardware.link(rank * layout.stride, peer * layout.stride)


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


# ---- search ----------------------------------------------------------------------------------------------------------


_LOW_EFFORT = 0.02  # for every candidate that its bound does not rule out
_MOST_ACTIONS = 60_000  # of a step; a candidate with more actions is not better than one with more rows
_PASSED = 8  # candidates whose bounds are made tighter before one of them is searched
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
        zero1: whether ranks along dp_replicate divide the optimizer's state.
        searches: whether the fastest plans also get an order of actions of their own, if that saves enough time.
    """

    def __init__(
        self,
        costs: LayoutCosts,
        devices: int,
        global_batch: int,
        memory_bytes: float | None = None,
        schedules: Sequence[str] = compared_names(),
        most_tp: int | None = None,
        effort: float = 1.0,
        zero1: bool = False,
        searches: bool = False,
    ) -> None:
        self._searches = searches
        self._costs, self._of_cluster, self._batch, self._memory = costs, devices, global_batch, memory_bytes
        self._schedules, self._effort = [find_recipe(name) for name in schedules], effort
        node = costs.hardware.links.ranks_per_node
        self._most_tp = min(node, most_tp or node) if costs.shares else 1
        self._choices: dict[JointCandidate, JointChoice | None] = {}
        self._zero1, self._problems = zero1, CandidateProblems(costs, memory_bytes, zero1)
        self._pipelines: dict[tuple[JointCandidate, bool], Solution | None] = {}

    @cached_property
    def candidates(self) -> tuple[JointCandidate, ...]:
        """Every candidate with numbers that are possible."""
        space = []
        for layout in layouts(self._of_cluster, self._costs.segments, self._most_tp, self._zero1):
            for rows in (self._costs.rows * times for times in _ROWS):
                microbatches, remaining_rows = divmod(self._batch, layout.copies * rows)
                if not microbatches or remaining_rows:
                    continue
                names = {"1f1b": 1} if layout.pp == 1 else {recipe.name: recipe.chunks for recipe in self._schedules}
                for name, chunks in names.items():
                    allowed = not find_recipe(name).rule(layout.pp, microbatches)
                    actions = 3 * layout.pp * chunks * microbatches
                    if allowed and layout.pp * chunks <= self._costs.segments and actions <= _MOST_ACTIONS:
                        candidate = JointCandidate(layout, name, chunks, rows, microbatches)
                        residents = self._problems.residents(layout, chunks)
                        space += [replace(candidate, resident=resident) for resident in residents]
        return tuple(space)

    def run(self) -> JointComparison:
        """Search all candidates that their bounds do not rule out.

        Raises:
            PlanError: no candidate has numbers that are possible.
            MemoryShortage: nothing fits.
        """
        if not self.candidates:
            raise PlanError(
                f"No layout of {self._of_cluster} devices divides a batch of {self._batch} rows into microbatches of "
                f"{self._costs.rows}, or 2, 4 or 8 times that number.",
                f"{argument('global_batch', self._of_cluster)}.",
            )
        problems = self._problems
        bounds = {candidate: problems.bound(candidate) for candidate in self.candidates if problems.may_fit(candidate)}
        choices: list[JointChoice] = []
        for whole_layers in (True, False) if self._problems.have_many_layers else (False,):
            if not choices:
                self._search_all(bounds, whole_layers)
                choices = [choice for choice in self._choices.values() if choice is not None]
        if not choices:
            raise self._shortage([*bounds] or self.candidates)
        fastest = min(choices, key=lambda choice: choice.step)
        final = self.search(fastest.candidate, self._effort, whole_layers=False)
        assert final is not None
        choices = [final if choice is fastest else choice for choice in choices]
        searched = len(self._choices)
        open_bounds = (bound for candidate, bound in bounds.items() if candidate not in self._choices)
        bound = min([final.step, *open_bounds, *(choice.lower_bound for choice in choices)])
        neighbours = tuple(self._neighbours(final.candidate))
        if self._searches and (orders := list(self._searched_orders(choices))):
            choices += orders
            bound = min(bound, *map(problems.work_bound, bounds))
        return JointComparison(pareto_front(choices), len(self.candidates), searched, bound, neighbours)

    def _searched_orders(self, choices: Sequence[JointChoice]) -> Iterator[JointChoice]:
        """Yield the fastest choices with the orders that `searched_schedule` finds for them, if these save enough.

        A choice of which not all stages are whole at a time keeps its order, which says when they are gathered.
        """
        for choice in sorted(choices, key=lambda joint_choice: joint_choice.step)[:SEARCHED]:
            candidate, solution = choice.candidate, choice.solution
            if candidate.layout.pp == 1 or candidate.resident is not None:
                continue
            links = self._problems.link(candidate.layout), self._costs.hardware.host_link
            staged = choice.costs.stages(solution.cuts)
            memory = None if self._memory is None else [self._memory] * candidate.layout.pp
            allowance = self._costs.factors.allowance
            limits = activation_limits(solution.schedule, staged, solution.memory, memory, allowance)
            times = stage_times(staged, solution.schedule, *links)
            schedule = searched_schedule(solution.schedule, times, limits, self._effort)
            if schedule is None:
                continue
            in_order = replace(solution, schedule=schedule, value=step_seconds(staged, schedule, *links), lower_bound=0)
            fitting = self._problems.problem_in_order(candidate, schedule).take(in_order)
            if fitting is None:
                continue
            step = self._step(candidate, choice.costs, fitting)
            if step < choice.step * (1 - LEAST_GAIN):
                yield replace(choice, solution=fitting, step=step, lower_bound=self._problems.work_bound(candidate))

    def _search_all(self, bounds: dict[JointCandidate, float], whole_layers: bool) -> None:
        """Search the candidates in the order of what they take at least, until that is as much as the best one takes.

        The bound of a candidate is made tighter when its turn comes, and it waits for its turn again. Now and then the
        most promising one of these is searched before that: a good plan that is found early rules out many others.
        """
        problems = self._problems
        waiting = [(bound, number, candidate) for number, (candidate, bound) in enumerate(bounds.items())]
        heapify(waiting)
        tight: list[tuple[float, int, JointCandidate]] = []
        best, passed = math.inf, 0
        while min(waiting[:1] + tight[:1], default=(math.inf,))[0] < best:
            report_progress("comparing plans", len(bounds) - len(waiting) - len(tight), len(bounds))
            is_next = not waiting or passed >= _PASSED or tight[:1] <= waiting[:1]
            if tight and tight[0][0] < best and is_next:
                _, _, candidate = heappop(tight)
                passed = 0
                if self._least_found(candidate, whole_layers) < best:
                    choice = self.search(candidate, whole_layers=whole_layers)
                    best = min(best, math.inf if choice is None else choice.step)
            else:
                _, number, candidate = heappop(waiting)
                passed += 1
                bound = bounds[candidate] = problems.tight_bound(candidate, best)
                if whole_layers and bound < best:
                    bound = max(bound, problems.slowest_stage(candidate) + problems.least_exposed(candidate))
                heappush(tight, (bound, number, candidate))

    def _least_found(self, candidate: JointCandidate, whole_layers: bool) -> float:
        """Return what a candidate takes at least by what was found for another division of its copies; 0 if nothing
        was, infinite if nothing fits there."""
        key = self._problems.leanest(candidate), whole_layers and self._problems.has_enough_layers(candidate)
        if key not in self._pipelines:
            return 0.0
        solution = self._pipelines[key]
        return math.inf if solution is None else solution.lower_bound + self._problems.least_exposed(candidate)

    def search(
        self, candidate: JointCandidate, effort: float | None = None, whole_layers: bool = True
    ) -> JointChoice | None:
        """Return a candidate with the best cuts and choices that were found; None if nothing fits.

        Args:
            effort: of a search for this candidate alone. Without one, what was found for the division of its copies
                that leaves the most memory is taken if it fits: with less memory, nothing is faster. Whole layers are
                searched for quickly then.
            whole_layers: whether a model of many layers is cut between layers only, if these are enough.
        """
        whole_layers = whole_layers and self._problems.has_enough_layers(candidate)
        if effort is None:
            solution = self._pipeline(candidate, whole_layers)
        else:
            known_choice = self._choices.get(candidate)
            initial_solution = known_choice.solution if known_choice is not None and not whole_layers else None
            solution = self._solve(candidate, effort, whole_layers, True, initial_solution)
        if solution is None:
            self._choices.setdefault(candidate, None)
            return self._choices[candidate]
        if whole_layers:  # other cuts may be better
            cuts = tuple(self._costs.layers[cut] for cut in solution.cuts)
            solution = replace(solution, cuts=cuts, lower_bound=0.0)
        options = self._costs.options(candidate.layout, candidate.rows)
        costs = StagedCosts([options[option] for option in solution.options])
        recompute = tuple(self._costs.recompute[option] for option in solution.options)
        least = max(self._problems.tight_bound(candidate), solution.lower_bound)
        choice = JointChoice(candidate, solution, self._step(candidate, costs, solution), least, recompute, costs)
        previous_choice = self._choices.get(candidate)
        if previous_choice is not None and previous_choice.step < choice.step:
            choice = replace(previous_choice, lower_bound=max(previous_choice.lower_bound, least))
        self._choices[candidate] = choice
        return choice

    def _pipeline(self, candidate: JointCandidate, whole_layers: bool) -> Solution | None:
        """Return the best cuts and choices that were found with little effort; None if nothing fits."""
        leanest = self._problems.leanest(candidate)
        if (leanest, whole_layers) not in self._pipelines:
            self._pipelines[leanest, whole_layers] = self._solve(leanest, _LOW_EFFORT, whole_layers, not whole_layers)
        solution = self._pipelines[leanest, whole_layers]
        if solution is None or candidate == leanest:
            return solution
        return self._problems.problem(candidate, whole_layers).take(solution) or self._solve(
            candidate, _LOW_EFFORT, whole_layers, not whole_layers
        )

    def _solve(
        self,
        candidate: JointCandidate,
        effort: float,
        whole_layers: bool,
        proves: bool,
        initial_solution: Solution | None = None,
    ) -> Solution | None:
        """Search for the cuts and choices of a candidate, from what is known. Returns None if nothing fits."""
        hidden = self._costs.hidden(candidate.layout, candidate.rows)
        uniform = [option for option in self._costs.single.uniform if option in hidden]
        try:
            return self._problems.problem(candidate, whole_layers).solve(
                uniform, effort, advises=False, proves=proves, initial_solution=initial_solution
            )
        except MemoryShortage:
            return None

    def _step(self, candidate: JointCandidate, costs: StagedCosts, solution: Solution) -> float:
        """Return the seconds of a step, with what its copies exchange."""
        hardware, layout, schedule = self._costs.hardware, candidate.layout, solution.schedule
        staged = costs.stages(solution.cuts)
        links = self._problems.link(layout), hardware.host_link
        value = step_seconds(staged, schedule, *links) + layout.agreement_seconds(hardware)
        if candidate.resident is None:
            return value + exposed_seconds(staged, schedule.placement, layout, self._costs)
        times = stage_times(staged, schedule, *links)
        return value + resident_seconds(staged, schedule, times, candidate.resident, layout, self._costs)

    def _shortage(self, candidates: Sequence[JointCandidate]) -> MemoryShortage:
        least = math.inf
        for candidate in sorted(candidates, key=lambda member: (-member.layout.pp * member.layout.tp, member.rows))[:3]:
            try:
                problem = CandidateProblems(self._costs, 1.0).problem(candidate, whole_layers=False)
                problem.solve((), _LOW_EFFORT)
            except MemoryShortage as shortage:
                least = min(least, shortage.peak)
        memory = self._memory or 0.0
        return MemoryShortage(
            f"No plan that was looked at fits into {format_bytes(memory)} on each device; the plan with the least "
            f"memory needs {format_bytes(least)}.",
            math.ceil(least),
            advice=f"{argument('memory_bytes', bytes_option(math.ceil(least)))}, or more devices.",
        )

    def _neighbours(self, best: JointCandidate) -> Iterator[Neighbour]:
        """Yield the nearest candidates along each axis. What one dimension of the mesh gains, another one loses."""
        visited = {best}
        for axis, value, candidate in self._steps(best):
            if candidate in visited:
                continue
            visited.add(candidate)
            is_possible = candidate in self.candidates and self._problems.may_fit(candidate)
            yield Neighbour(axis, value, self.search(candidate) if is_possible else None)

    def _steps(self, best: JointCandidate) -> Iterator[tuple[str, str, JointCandidate]]:
        layout = best.layout
        lengths = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp}
        for doubled_dim in lengths:
            for halved_dim in lengths:
                if doubled_dim != halved_dim and lengths[halved_dim] % 2 == 0:
                    changed = {**lengths, doubled_dim: 2 * lengths[doubled_dim], halved_dim: lengths[halved_dim] // 2}
                    other_layout = Layout(**changed, zero1=self._zero1 and changed["dp_replicate"] > 1)
                    microbatches = self._batch // (other_layout.copies * best.rows)
                    schedule, chunks = ("1f1b", 1) if other_layout.pp == 1 else (best.schedule, best.chunks)
                    resident = best.resident if other_layout.dp_shard > 1 and chunks == best.chunks else None
                    candidate = JointCandidate(other_layout, schedule, chunks, best.rows, microbatches, resident)
                    yield f"{doubled_dim} × 2", f"{halved_dim} ÷ 2", candidate
        for rows in (best.rows * 2, best.rows // 2):
            if rows:
                microbatches = self._batch // (layout.copies * rows)
                yield "rows", str(rows), replace(best, rows=rows, microbatches=microbatches)
        for recipe in self._schedules if layout.pp > 1 else ():
            resident = best.resident if recipe.chunks == best.chunks else None
            yield "schedule", recipe.name, replace(best, schedule=recipe.name, chunks=recipe.chunks, resident=resident)
        for resident in self._problems.residents(layout, best.chunks):
            yield "resident", "all" if resident is None else str(resident), replace(best, resident=resident)


# ---- joint -----------------------------------------------------------------------------------------------------------
# ``joint_plan``: the best plan of a model for a cluster, over all axes.


@rare_collection()  # schedules of many actions
def joint_plan(
    capture_rows: Callable[[int], tuple[Captured, tuple[LossOf, Any] | None]],
    rows: int,
    options: PlanOptions,
    devices: int,
    global_batch: int,
    schedules: Sequence[str] = compared_names(),
    tp_plan: Mapping[str, str] | None = None,
    most_tp: int | None = None,
    zero1: bool = False,
    divides_tokens: bool = False,
    searches: bool = False,
) -> tuple[JointComparison, Plan]:
    """Compare the plans of a model for a cluster, and return them with the best one.

    Args:
        capture_rows: captures the model with a number of rows of a microbatch; also returns the loss and the target, as
            in `PlanOptions`.
        rows: the least number of rows to consider; two, four and eight times this number are considered too.
        options: how the model is priced, ``auto`` as ``time``; ``memory_bytes`` is one number, the memory of a device.
        devices: the number of devices.
        global_batch: rows of a step over all devices.
        schedules: to compare.
        tp_plan: the model's tensor-parallel plan; without one there is no tp.
        most_tp: the largest number of ranks along tp; by default the ranks of a node.
        zero1: whether the optimizer's state is divided between the ranks along dp_replicate.
        divides_tokens: whether ranks along tp divide the tokens of what no style divides (`tensor_shares`).
        searches: whether the fastest plans also get an order of actions of their own, if that saves enough time.

    Raises:
        PlanError: no layout has numbers that are possible; a `MemoryShortage` if nothing fits.
    """
    options = replace(options, balance="time") if options.balance == AUTO else options
    captured = {count: capture_rows(count) for count in (rows, 2 * rows)}
    single, double = (RecomputeOptions.price(model, replace(options, loss=loss)) for model, loss in captured.values())
    single, double = single.only(double.recompute), double.only(single.recompute)
    shares = tensor_shares(single.costs[0].priced.chain, tp_plan, divides_tokens) if tp_plan else []
    costs = LayoutCosts(options.hardware, rows, single, double, shares, options.factors)
    memory = None if options.memory_bytes is None else options.largest_memory
    search = JointSearch(costs, devices, global_batch, memory, schedules, most_tp, options.effort, zero1, searches)
    comparison = search.run()
    best = comparison.best
    model, _ = captured.get(best.candidate.rows) or capture_rows(best.candidate.rows)
    return comparison, plan_of_choice(model, best, options, comparison.lower_bound)


def plan_of_choice(captured: Captured, choice: JointChoice, options: PlanOptions, bound: float) -> Plan:
    """Return the plan of a choice, of which no plan takes less than ``bound`` seconds, for a model that was captured
    with its rows of a microbatch."""
    candidate, layout = choice.candidate, choice.candidate.layout
    plan_options = replace(
        options,
        schedule=candidate.schedule if choice.has_named_order else choice.solution.schedule,
        microbatches=candidate.microbatches,
        ranks=layout.pp,
        recompute=choice.recompute,
        factors_of_layout=candidate.factors(options.factors),
        stride=layout.stride,
    )
    cuts = CutChoice(choice.costs, plan_options, choice.solution.cuts, choice.solution.schedule, choice.solution)
    mesh = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp}
    predicted = cuts.predict()
    collectives = choice.step - choice.solution.value
    prediction = structs.replace(
        predicted,
        value=rounded(choice.step),
        lower_bound=rounded(min(bound, choice.step)),
        mesh=mesh if layout.stride > 1 else {},
        resident=candidate.resident,
        zero1=layout.zero1,
        cuts=tuple(
            structs.replace(cut, earlier=_with(cut.earlier, collectives), later=_with(cut.later, collectives))
            for cut in predicted.cuts
        ),
    ).with_reasons()
    points = [str(point) for point in cuts.points]
    cut_plan = plan(captured, points=points) if points else plan(captured, stages=1, balance="uniform")
    return replace(cut_plan.predicted(prediction), priced=choice.costs.priced)


def _with(cut: ShiftedCut | None, collectives: float) -> ShiftedCut | None:
    """The next place for a cut, with the seconds of collectives, as the value of the plan counts them."""
    return cut if cut is None or cut.value is None else structs.replace(cut, value=rounded(cut.value + collectives))
