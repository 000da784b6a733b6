"""The comparison of plans over schedules, stages on a rank, microbatches and recompute.

A model is priced once for each recompute: one for all stages, or one for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipegraph.arguments import argument, for_asker
from pipegraph.cost import SegmentCost
from pipegraph.errors import ArgumentError, PlanError, ScheduleError
from pipegraph.graph.captured import Captured
from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.planner.cut_choice import CutChoice, choose_cuts, improve_cuts, refine_cuts
from pipegraph.planner.plan_options import ChainCosts, PlanOptions
from pipegraph.planner.recompute_options import RecomputeOptions
from pipegraph.planner.searched_order import searched_orders
from pipegraph.planner.solver.solve import MemoryShortage, solve
from pipegraph.planner.solver.solve_arguments import memory_text
from pipegraph.recompute import AUTO, CHOICES, EVERYWHERE, OFFLOAD, Recompute, check_text, parse_stages, text_of_stages
from pipegraph.schedule import Schedule
from pipegraph.schedule.recipes import RECIPES, find_recipe, names
from pipegraph.units import bytes_option, format_number_of

SAME_MEMORY = 0.01
"""Plans whose memory differs by less than this fraction count as equal in memory."""
SAME_TIME = 0.002
"""Plans whose times differ by less than this fraction count as equally fast."""

# By which part the figures of a plan may change when its cuts are searched for. From the first estimate on: by a
# segment's part of a stage, and at least _LEAST_CHANGE; by anything if that is more than _LARGEST_CHANGE. From the
# second estimate on: by a sixth of that.
_LEAST_CHANGE, _LARGEST_CHANGE, _SECOND_SHARE = 0.05, 0.25, 1 / 6
_LOW_EFFORT = 0.05
_COMPARED = tuple(choice for choice in CHOICES if choice != OFFLOAD)
_MANY_STAGES = 32  # 4 stages on a rank are compared by default if the total is at most this number
_SIMULATED = 2_000  # forwards of a step that is simulated for each of many cuts
_CLOSEST = 3  # plans whose estimates do not fit that are searched all the same


@dataclass(frozen=True)
class PlanCandidate:
    """One of the plans to compare."""

    schedule: str
    chunks: int
    microbatches: int
    recompute: str


@dataclass(frozen=True)
class PlanComparison:
    """The plans worth choosing from: no other one has less time per microbatch and needs no more memory.

    Attributes:
        choices: fastest first; the first one is the best.
        considered: how many were compared.
        refused: why others were not: schedules that cannot have these numbers.
    """

    choices: tuple[CutChoice, ...]
    considered: int
    refused: tuple[str, ...]

    @property
    def best(self) -> CutChoice:
        return self.choices[0]


def candidates(
    ranks: int,
    schedules: Sequence[str] | None = None,
    microbatches: Sequence[int] | None = None,
    chunks: Sequence[int] | None = None,
    recompute: Sequence[str] = _COMPARED,
) -> tuple[PlanCandidate, ...]:
    """Return the plans to compare for a number of ranks.

    Args:
        ranks: the number of ranks that hold the stages.
        schedules: names; by default every schedule with a backward.
        microbatches: of a step; by default 2 and 4 for each rank.
        chunks: stages on a rank, for schedules that can have any number of them; by default the schedule's own (1 or
            2), and 4 if that makes no more than 32 stages.
        recompute: what backwards recompute, as text: one choice for all stages; one for each stage, for plans with this
            number of stages; or "auto" for the best choice of each stage. By default every choice that needs no link
            to CPU memory.

    Raises:
        ScheduleError: an unknown schedule.
        ArgumentError: an unknown recompute; no schedule can have this number of stages on a rank; or a recompute is for
            a number of stages that no plan has.
    """
    for text in recompute:
        check_text(text)
    stages_of = {choice: len(text_of_stages(choice)) for choice in recompute}  # 1 for what holds for any number of them
    recipes = [find_recipe(name) for name in schedules] if schedules else [entry for entry in RECIPES if entry.trains]
    plans = []
    for recipe in recipes:
        numbers = [recipe.chunks]
        if recipe.any_chunks:
            extra_chunks = [4] if recipe.chunks == 2 and 4 * ranks <= _MANY_STAGES else []
            numbers = list(chunks) if chunks else numbers + extra_chunks
        elif chunks and recipe.chunks not in chunks:
            continue
        again = recompute if recipe.trains else recompute[:1]  # without a backward it does not matter
        plans += [
            PlanCandidate(recipe.name, number, count, choice)
            for number in numbers
            for count in microbatches or (2 * ranks, 4 * ranks)
            for choice in again
            if stages_of[choice] in (1, ranks * number)
        ]
    for text, stages in stages_of.items():
        if stages > 1 and all(plan.recompute != text for plan in plans):
            raise ArgumentError(
                f"{argument('recompute', text)} has a choice for each of {stages} stages, and no plan that is compared "
                f"has that number on {format_number_of('rank', ranks)}.",
                "one for each stage, or one for all.",
            )
    if not plans:
        several = ", ".join(recipe.name for recipe in RECIPES if recipe.any_chunks)
        raise ArgumentError(
            f"{', '.join(f'{recipe.name} has {recipe.chunks}' for recipe in recipes)} to a rank, and "
            f"{argument('chunks', chunks or (), '--stages-per-rank')} was given.",
            f"{argument('schedules', option='--schedule')} with one of {several}.",
        )
    return tuple(plans)


def compare_plans(
    costs: Mapping[str, ChainCosts],
    options: PlanOptions,
    ranks: int,
    plans: Sequence[PlanCandidate],
    searches: bool = False,
) -> PlanComparison:
    """Compare plans of a model that is priced for each recompute.

    A first estimate of each plan takes the cuts whose slowest stage is the fastest, a second one the best cuts nearby.
    After each, plans that are far worse than others are left out. For the rest, the best cuts are searched for, and for
    some whose first estimate is faster but takes too much memory. With ``searches`` the best also get an order of their
    own, if that saves enough time.

    Raises:
        MemoryShortage: no plan fits the memory; it names the closest one.
        PlanError: no schedule can have these numbers.
    """
    segments = max(len(chain.segments) for chain in costs.values())
    fewest = min(plans, key=lambda plan: plan.chunks)
    if ranks * fewest.chunks > segments:
        possible = segments // fewest.chunks
        chunks = max(1, segments // ranks)
        fewer = for_asker(f"chunks={chunks}", f"--stages-per-rank {chunks}")
        raise PlanError(
            f"The model can be cut into {format_number_of('segment', segments)}, and {fewest.schedule} has "
            f"{ranks * fewest.chunks} stages on {ranks} ranks.",
            f"{argument('ranks', possible) + (' or fewer' if possible > 1 else '') if possible else fewer}.",
        )
    estimates, refused = _first_estimates(costs, options, ranks, plans)
    if not estimates:
        raise nothing_to_compare(refused)
    memory = options.largest_memory
    change = max(_possible_change(estimate.costs.segments, estimate.schedule.stages) for estimate in estimates)
    estimates_left = _competitive([cuts for cuts in estimates if cuts.peak <= memory * (1 + change)], memory, change)
    second_change = min(change, _LARGEST_CHANGE) * _SECOND_SHARE
    second_estimates = _competitive([improve_cuts(estimate) for estimate in estimates_left], memory, second_change)
    choices, shortages = _search_cuts(second_estimates, options.effort)
    # Even cuts of a plan may need far more memory than its best ones that fit.
    fastest = min((choice.per_microbatch for choice in choices), default=math.inf)
    large = [choice for choice in estimates if choice.peak > memory * (1 + change) and choice.per_microbatch < fastest]
    closest = sorted(large if choices else estimates, key=lambda choice: choice.peak)[:_CLOSEST]
    more_choices, more_shortages = _search_cuts(closest, _LOW_EFFORT * options.effort)
    choices, shortages = choices + more_choices, shortages + more_shortages
    if not choices:
        raise _shortage(shortages, options.memory_of_ranks(ranks))
    choices = [choice.with_branches() for choice in choices] + _side_by_side(estimates)
    best, *alternatives = pareto_front(choices)
    front = (refine_cuts(best), *alternatives)
    searched = tuple(searched_orders(front)) if searches else ()
    return PlanComparison(pareto_front([*front, *searched]) if searched else front, len(estimates), refused)


def nothing_to_compare(refused: Iterable[str]) -> PlanError:
    """Return the error of plans none of which is possible, each for one of these reasons."""
    hint = "Try: fewer ranks, or another schedule or number of microbatches."
    return PlanError("\n".join(["No plan can be compared.", *refused, hint]))


def _first_estimates(
    costs: Mapping[str, ChainCosts], options: PlanOptions, ranks: int, plans: Sequence[PlanCandidate]
) -> tuple[list[CutChoice], tuple[str, ...]]:
    """Return every plan that is possible, with the most even cuts; and why others are not."""
    refused: dict[str, None] = {}
    estimates = []
    even: dict[tuple[str, int], tuple[int, ...]] = {}
    for plan in plans:
        chain, stages = costs[plan.recompute], ranks * plan.chunks
        if stages > len(chain.segments):
            why = f"{plan.schedule} has {stages} stages, and the model can be cut into {len(chain.segments)} segments."
            refused[why] = None
            continue
        plan_options = replace(
            options,
            schedule=plan.schedule,
            microbatches=plan.microbatches,
            ranks=ranks,
            recompute=Recompute.parse(plan.recompute),
        )
        try:
            schedule = plan_options.schedule_of(stages)
        except (ScheduleError, PlanError) as error:
            refused[str(error).replace("\n", " ")] = None
            continue
        if (plan.recompute, stages) not in even:
            even[plan.recompute, stages] = solve(
                chain.segments, stages, "gpipe", 1, objective="bottleneck", alternatives=0, effort=_LOW_EFFORT
            ).cuts
        estimates.append(CutChoice(chain, plan_options, even[plan.recompute, stages], schedule))
    return estimates, tuple(refused)


def _possible_change(costs: Sequence[SegmentCost], stages: int) -> float:
    """Return by which part a step may become shorter: about the part of a stage that the median segment is."""
    times = sorted(cost.forward + cost.input_grad + cost.weight_grad for cost in costs)
    part = times[len(times) // 2] * stages / max(sum(times), 1e-30)
    return max(part, _LEAST_CHANGE) if part <= _LARGEST_CHANGE else math.inf


def _competitive(choices: Sequence[CutChoice], memory: float, margin: float) -> list[CutChoice]:
    """Return the choices without those that a fitting choice beats by ``margin`` in time or memory.

    A faster choice may need a little more memory, as in `pareto_front`.
    """

    def beats(rival: CutChoice, plan: CutChoice) -> bool:
        faster = (
            rival.per_microbatch * (1 + margin) <= plan.per_microbatch and rival.peak * (1 - SAME_MEMORY) <= plan.peak
        )
        leaner = rival.per_microbatch <= plan.per_microbatch and rival.peak * (1 + margin) <= plan.peak
        return faster or leaner

    fitting = [choice for choice in choices if choice.peak <= memory]
    return [choice for choice in choices if not any(beats(rival, choice) for rival in fitting)]


def _side_by_side(estimates: Sequence[CutChoice]) -> list[CutChoice]:
    """Return the plans that fit and have stages side by side, with the best cuts near those of estimates."""
    branched = (
        refine_cuts(choice.with_branches())
        for choice in estimates
        if choice.costs.priced.chain.branch_starts
        and choice.schedule.stages * choice.schedule.microbatches <= _SIMULATED
    )
    return [choice for choice in branched if choice.schedule.edges is not None and choice.fits]


def _search_cuts(
    estimates: Sequence[CutChoice], effort: float
) -> tuple[list[CutChoice], list[tuple[CutChoice, MemoryShortage]]]:
    """Return the best cuts of the plans that fit into the memory, and the shortages of the others."""
    choices, shortages = [], []
    for choice in estimates:
        try:
            choices.append(choose_cuts(choice.costs, replace(choice.options, effort=effort), choice.schedule.stages))
        except MemoryShortage as shortage:
            shortages.append((choice, shortage))
    return choices, shortages


def _shortage(shortages: Sequence[tuple[CutChoice, MemoryShortage]], limits: Sequence[float]) -> MemoryShortage:
    choice, least = min(shortages, key=lambda pair: pair[1].peak)
    schedule, again = choice.schedule, choice.options.recompute_text
    return MemoryShortage(
        f"No plan that was compared fits into {memory_text(limits)}. The closest is {schedule.name} with "
        f"{schedule.stages} stages, {schedule.microbatches} microbatches and recompute {again}:\n"
        f"{least.problem}",
        least.peak,
        advice=f"{argument('memory_bytes', bytes_option(least.peak))}, or more ranks.",
    )


def pareto_front(choices: Sequence[CutChoice]) -> tuple[CutChoice, ...]:
    """Return the choices that no other one equals in both time and memory, the fastest first.

    Equal means within `SAME_TIME` and `SAME_MEMORY`. Of equal ones, the simplest is taken.
    """
    remaining_choices, front = list(choices), list[CutChoice]()
    while remaining_choices:
        fastest = min(choice.per_microbatch for choice in remaining_choices)
        as_fast = [choice for choice in remaining_choices if choice.per_microbatch <= fastest * (1 + SAME_TIME)]
        leanest = min(choice.peak for choice in as_fast)
        chosen = min((choice for choice in as_fast if choice.peak * (1 - SAME_MEMORY) <= leanest), key=_complexity)
        front.append(chosen)
        remaining_choices = [choice for choice in remaining_choices if choice.peak <= chosen.peak * (1 - SAME_MEMORY)]
    return tuple(front)


def _complexity(choice: CutChoice) -> tuple[int, int, int, float]:
    """Return the number of stages, and the positions of the schedule and of recompute among all."""
    schedule, again = choice.schedule, choice.options.recompute_text
    return (
        schedule.stages,
        names().index(schedule.name) if schedule.name in names() else len(names()),
        CHOICES.index(again) if again in CHOICES else len(CHOICES),
        choice.per_microbatch,
    )


# ---- models ----------------------------------------------------------------------------------------------------------
# Plans of a model, by what kind of recompute they have.


_FREE_EFFORT = 0.2
_FIRST_EFFORT = 0.02


def compare_model(
    captured: Captured, options: PlanOptions, ranks: int, plans: Sequence[PlanCandidate], searches: bool = False
) -> PlanComparison:
    """Price a model once for each recompute, and compare plans.

    With ``searches`` the best also get an order of their own, if that saves enough time.

    Raises as `compare_plans` does, and PlanError if a parameter is too large for any rank.
    """
    options.check_parameters_fit(captured)
    options = options.on_ranks(ranks)
    of_kinds: dict[Compare, list[PlanCandidate]] = {}
    for plan in plans:
        compare = _way(plan.recompute) if options.rank_profiles is None else _compare_chosen
        of_kinds.setdefault(compare, []).append(plan)
    comparisons, problems = list[PlanComparison](), list[PlanError]()
    for compare, candidates in of_kinds.items():
        try:
            comparisons.append(compare(captured, options, ranks, candidates, searches))
        except PlanError as problem:
            problems.append(problem)
    if not comparisons:
        shortages = [error for error in problems if isinstance(error, MemoryShortage)]
        raise min(shortages, key=lambda shortage: shortage.peak, default=problems[0])
    if len(comparisons) == 1:
        return comparisons[0]
    return PlanComparison(
        pareto_front([choice for comparison in comparisons for choice in comparison.choices]),
        sum(comparison.considered for comparison in comparisons),
        tuple(dict.fromkeys(why for comparison in comparisons for why in comparison.refused)),
    )


Compare = Callable[[Captured, PlanOptions, int, Sequence[PlanCandidate], bool], PlanComparison]
"""Compares plans whose recompute is of one kind."""


def _way(recompute: str) -> Compare:
    if recompute == AUTO:
        return _compare_free
    return _compare_alike if len(text_of_stages(recompute)) == 1 else _compare_chosen


def _compare_alike(
    captured: Captured, options: PlanOptions, ranks: int, plans: Sequence[PlanCandidate], searches: bool
) -> PlanComparison:
    """Compare plans with one choice for all stages."""
    return compare_plans(price_candidates(captured, options, plans), options, ranks, plans, searches)


def _compare_free(
    captured: Captured, options: PlanOptions, ranks: int, plans: Sequence[PlanCandidate], searches: bool
) -> PlanComparison:
    """Compare plans of which each stage computes again what is best.

    Stages choose for schedules and microbatches that are worth it with one choice for all stages.
    """
    priced = RecomputeOptions.price(captured, options)
    of_names = {str(priced.recompute[index]): priced.costs[index] for index in priced.uniform}
    candidates = [replace(plan, recompute=name) for plan in plans for name in of_names]
    comparison = compare_plans(of_names, options, ranks, candidates, searches)
    choices: dict[Schedule, CutChoice] = {}
    for choice in comparison.choices:
        if choice.schedule not in choices:
            free_options = replace(choice.options, recompute=EVERYWHERE, effort=_FREE_EFFORT * options.effort)
            choices[choice.schedule] = priced.choose(free_options, choice.schedule.stages)
    return PlanComparison(pareto_front([*choices.values()]), len(plans), comparison.refused)


def _compare_chosen(
    captured: Captured, options: PlanOptions, ranks: int, plans: Sequence[PlanCandidate], searches: bool
) -> PlanComparison:
    """Compare plans whose stages have different choices: what each stage was given to compute again, or the device of
    its rank.

    All are searched with little effort, and those that are worth a choice with more.
    """
    choices, shortages, refused = dict[int, CutChoice](), list[MemoryShortage](), dict[str, None]()
    priced: dict[tuple[str, int], RecomputeOptions] = {}
    traced: dict[str, DividedFunction] = {}

    def choose(plan: PlanCandidate, effort: float) -> CutChoice:
        stages = ranks * plan.chunks
        plan_options = replace(
            options, schedule=plan.schedule, microbatches=plan.microbatches, ranks=ranks, effort=effort * options.effort
        )
        plan_options.schedule_of(stages)
        if plan.recompute == AUTO:
            if (AUTO, 0) not in priced:
                priced[AUTO, 0] = RecomputeOptions.price(captured, options, traced=traced)
            return priced[AUTO, 0].choose(plan_options, stages)
        if (plan.recompute, stages) not in priced:
            recompute = parse_stages(plan.recompute, stages)
            recompute = recompute * stages if len(recompute) == 1 else recompute
            priced[plan.recompute, stages] = RecomputeOptions.of_stages(captured, options, recompute, traced)
        return priced[plan.recompute, stages].choose(plan_options, stages)

    def improve(plan: PlanCandidate, choice: CutChoice) -> CutChoice:
        try:
            return min(choose(plan, _FREE_EFFORT), choice, key=lambda cuts: cuts.value)
        except MemoryShortage:
            return choice

    for number, plan in enumerate(plans):
        try:
            choices[number] = choose(plan, _FIRST_EFFORT)
        except MemoryShortage as shortage:
            shortages.append(shortage)
        except (ScheduleError, PlanError) as error:
            if isinstance(error, ArgumentError):
                raise
            refused[str(error).replace("\n", " ")] = None
    if choices:
        worthwhile = {id(choice) for choice in pareto_front([*choices.values()])}
        improved = [improve(plans[number], choice) for number, choice in choices.items() if id(choice) in worthwhile]
        front = pareto_front([choice.with_branches() for choice in improved])
        searched = searched_orders(front) if searches else ()
        return PlanComparison(pareto_front([*front, *searched]), len(plans) - len(refused), tuple(refused))
    if shortages:
        raise min(shortages, key=lambda problem: problem.peak)
    raise nothing_to_compare(refused)


def price_candidates(captured: Captured, options: PlanOptions, plans: Sequence[PlanCandidate]) -> dict[str, ChainCosts]:
    """Return the costs of a model for each recompute of the plans."""
    names = dict.fromkeys(plan.recompute for plan in plans)
    traced: dict[str, DividedFunction] = {}
    return {name: replace(options, recompute=Recompute.parse(name)).price(captured, traced=traced) for name in names}
