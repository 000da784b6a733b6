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
    found, problems = list[PlanComparison](), list[PlanError]()
    for compare, each in of_kinds.items():
        try:
            found.append(compare(captured, options, ranks, each))
        except PlanError as problem:
            problems.append(problem)
    if not found:
        shortages = [each for each in problems if isinstance(each, MemoryShortage)]
        raise min(shortages, key=lambda each: each.needed, default=problems[0])
    if len(found) == 1:
        return found[0]
    return PlanComparison(
        pareto_front([choice for each in found for choice in each.choices]),
        sum(each.considered for each in found),
        tuple(dict.fromkeys(why for each in found for why in each.refused)),
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
    each = [replace(plan, recompute=name) for plan in plans for name in of_names]
    alike = compare_plans(of_names, options, ranks, each)
    found: dict[Schedule, CutChoice] = {}
    for choice in alike.choices:
        if choice.schedule not in found:
            own = replace(choice.options, recompute=EVERYWHERE, effort=_FREE_EFFORT * options.effort)
            found[choice.schedule] = priced.choose(own, choice.schedule.stages)
    return PlanComparison(pareto_front([*found.values()]), len(plans), alike.refused)


def _compare_given(
    captured: Captured, options: PlanOptions, ranks: int, plans: Sequence[PlanCandidate]
) -> PlanComparison:
    """Compare plans of which each stage computes again what it was given."""
    found, shortages, refused = list[CutChoice](), list[MemoryShortage](), dict[str, None]()
    of_texts: dict[str, RecomputeOptions] = {}
    for plan in plans:
        stages = ranks * plan.chunks
        own = replace(options, schedule=plan.schedule, microbatches=plan.microbatches, ranks=ranks)
        try:
            own.schedule_of(stages)
            if plan.recompute not in of_texts:
                each = parse_stages(plan.recompute, stages)
                of_texts[plan.recompute] = RecomputeOptions.of_stages(captured, options, each)
            own = replace(own, effort=_FREE_EFFORT * options.effort)
            found.append(of_texts[plan.recompute].choose(own, stages))
        except MemoryShortage as shortage:
            shortages.append(shortage)
        except (ScheduleError, PlanError) as error:
            if isinstance(error, ArgumentError):
                raise
            refused[str(error).replace("\n", " ")] = None
    if found:
        return PlanComparison(pareto_front(found), len(plans) - len(refused), tuple(refused))
    if shortages:
        raise min(shortages, key=lambda each: each.needed)
    raise nothing_to_compare(refused)


def price_candidates(captured: Captured, options: PlanOptions, plans: Sequence[PlanCandidate]) -> dict[str, ChainCosts]:
    """Return the costs of a model for each recompute of the plans."""
    names = dict.fromkeys(plan.recompute for plan in plans)
    traced: dict[str, DividedFunction] = {}
    return {name: replace(options, recompute=Recompute.parse(name)).price(captured, traced=traced) for name in names}
