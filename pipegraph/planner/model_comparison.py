"""The comparison of plans of a model, which is priced once for each recompute: one for all stages, or one for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pipegraph.errors import ArgumentError, PlanError, ScheduleError
from pipegraph.graph.captured import Captured
from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.planner.comparison import PlanCandidate, PlanComparison, compare_plans, nothing_to_compare, pareto_front
from pipegraph.planner.cut_choice import CutChoice
from pipegraph.planner.plan_options import ChainCosts, PlanOptions
from pipegraph.planner.recompute_options import RecomputeOptions
from pipegraph.planner.solver.solve import MemoryShortage
from pipegraph.recompute import AUTO, EVERYWHERE, Recompute, parse_stages, text_of_stages
from pipegraph.schedule import Schedule

_FREE_EFFORT = 0.2


def compare_model(
    captured: Captured, options: PlanOptions, ranks: int, plans: Sequence[PlanCandidate]
) -> PlanComparison:
    """Price a model once for each recompute, and compare plans.

    Raises as `compare_plans` does, and PlanError if a parameter is too large for any rank.
    """
    options.check_parameters_fit(captured)
    options = options.on_ranks(ranks)
    of_kinds: dict[Compare, list[PlanCandidate]] = {}
    for plan in plans:
        of_kinds.setdefault(_way(plan.recompute), []).append(plan)
    comparisons, problems = list[PlanComparison](), list[PlanError]()
    for compare, candidates in of_kinds.items():
        try:
            comparisons.append(compare(captured, options, ranks, candidates))
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


Compare = Callable[[Captured, PlanOptions, int, Sequence[PlanCandidate]], PlanComparison]
"""Compares plans whose recompute is of one kind."""


def _way(recompute: str) -> Compare:
    if recompute == AUTO:
        return _compare_free
    return _compare_alike if len(text_of_stages(recompute)) == 1 else _compare_given


def _compare_alike(
    captured: Captured, options: PlanOptions, ranks: int, plans: Sequence[PlanCandidate]
) -> PlanComparison:
    """Compare plans with one choice for all stages."""
    return compare_plans(price_candidates(captured, options, plans), options, ranks, plans)


def _compare_free(
    captured: Captured, options: PlanOptions, ranks: int, plans: Sequence[PlanCandidate]
) -> PlanComparison:
    """Compare plans of which each stage computes again what is best.

    Stages choose for schedules and microbatches that are worth it with one choice for all stages.
    """
    priced = RecomputeOptions.price(captured, options)
    of_names = {str(priced.recompute[index]): priced.costs[index] for index in priced.uniform}
    candidates = [replace(plan, recompute=name) for plan in plans for name in of_names]
    comparison = compare_plans(of_names, options, ranks, candidates)
    choices: dict[Schedule, CutChoice] = {}
    for choice in comparison.choices:
        if choice.schedule not in choices:
            free_options = replace(choice.options, recompute=EVERYWHERE, effort=_FREE_EFFORT * options.effort)
            choices[choice.schedule] = priced.choose(free_options, choice.schedule.stages)
    return PlanComparison(pareto_front([*choices.values()]), len(plans), comparison.refused)


def _compare_given(
    captured: Captured, options: PlanOptions, ranks: int, plans: Sequence[PlanCandidate]
) -> PlanComparison:
    """Compare plans of which each stage computes again what it was given."""
    choices, shortages, refused = list[CutChoice](), list[MemoryShortage](), dict[str, None]()
    of_texts: dict[str, RecomputeOptions] = {}
    for plan in plans:
        stages = ranks * plan.chunks
        plan_options = replace(options, schedule=plan.schedule, microbatches=plan.microbatches, ranks=ranks)
        try:
            plan_options.schedule_of(stages)
            if plan.recompute not in of_texts:
                recompute = parse_stages(plan.recompute, stages)
                of_texts[plan.recompute] = RecomputeOptions.of_stages(captured, options, recompute)
            plan_options = replace(plan_options, effort=_FREE_EFFORT * options.effort)
            choices.append(of_texts[plan.recompute].choose(plan_options, stages))
        except MemoryShortage as shortage:
            shortages.append(shortage)
        except (ScheduleError, PlanError) as error:
            if isinstance(error, ArgumentError):
                raise
            refused[str(error).replace("\n", " ")] = None
    if choices:
        return PlanComparison(pareto_front(choices), len(plans) - len(refused), tuple(refused))
    if shortages:
        raise min(shortages, key=lambda problem: problem.peak)
    raise nothing_to_compare(refused)


def price_candidates(captured: Captured, options: PlanOptions, plans: Sequence[PlanCandidate]) -> dict[str, ChainCosts]:
    """Return the costs of a model for each recompute of the plans."""
    names = dict.fromkeys(plan.recompute for plan in plans)
    traced: dict[str, DividedFunction] = {}
    return {name: replace(options, recompute=Recompute.parse(name)).price(captured, traced=traced) for name in names}
