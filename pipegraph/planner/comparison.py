"""The search over schedules, stages on a rank, microbatches and recompute: which of them are worth a choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipegraph.cost import SegmentCost
from pipegraph.errors import PlanError, ScheduleError
from pipegraph.graph.captured import Captured
from pipegraph.kernels.registry import RECOMPUTE
from pipegraph.planner.arguments import ArgumentError, check_recompute
from pipegraph.planner.cut_choice import Choice, choose, evaluate, settle
from pipegraph.planner.plan_options import Aim
from pipegraph.planner.priced_model import Costs
from pipegraph.planner.solver.memory_shortage import MemoryShortage
from pipegraph.planner.solver.solve import solve
from pipegraph.planner.step_estimate import improve
from pipegraph.schedule.recipes import RECIPES, find_recipe, names
from pipegraph.units import bytes_option, format_bytes, format_number_of

WORTH = 0.01
"""A plan that saves less than this part of another's memory is as lean."""
SAME = 0.002
"""A plan that takes longer by less than this part is as fast."""

# By how much a plan's figures may change from the first look on: by as much as one segment is of a stage, but at least
# by _LEAST; where that is more than _MOST, by anything. From the second look on: by this part of that, at most.
_LEAST, _MOST = 0.05, 0.25
_SECOND = 1 / 6
_LOW = 0.05  # the effort of a first look
_MOST_STAGES = 32  # with which schedules for any number of stages on a rank are tried by themselves
_CLOSEST = 3  # of those that do not fit, so many are looked at for what would do


@dataclass(frozen=True)
class Candidate:
    """One of the plans to compare."""

    schedule: str
    chunks: int
    microbatches: int
    recompute: str


@dataclass(frozen=True)
class Comparison:
    """The plans worth a choice: no other that was searched has less time per microbatch and needs no more memory.

    Attributes:
        choices: fastest first; the first one is the best.
        considered: how many were compared.
        refused: why others were not: schedules that cannot have these numbers.
    """

    choices: tuple[Choice, ...]
    considered: int
    refused: tuple[str, ...]

    @property
    def best(self) -> Choice:
        return self.choices[0]


def candidates(
    ranks: int,
    schedules: Sequence[str] | None = None,
    microbatches: Sequence[int] | None = None,
    chunks: Sequence[int] | None = None,
    recompute: Sequence[str] = RECOMPUTE,
) -> tuple[Candidate, ...]:
    """The plans to compare for so many ranks.

    By default: every schedule with a backward; 2 and 4 microbatches for each rank; schedules that can have any number
    of stages on a rank with their own (1 or 2), and with 4 while that makes no more than 32 stages.

    Raises ScheduleError for a schedule, and ArgumentError for a recompute that there is not; and where no schedule has
    so many stages on a rank.
    """
    for each in recompute:
        check_recompute(each)
    chosen = [find_recipe(name) for name in schedules] if schedules else [recipe for recipe in RECIPES if recipe.trains]
    found = []
    for recipe in chosen:
        numbers = [recipe.chunks]
        if recipe.any_chunks:
            more = [4] if recipe.chunks == 2 and 4 * ranks <= _MOST_STAGES else []
            numbers = list(chunks) if chunks else numbers + more
        elif chunks and recipe.chunks not in chunks:
            continue
        for number in numbers:
            for count in microbatches or (2 * ranks, 4 * ranks):
                again = recompute if recipe.trains else recompute[:1]  # without a backward none matters
                found += [Candidate(recipe.name, number, count, each) for each in again]
    if not found:
        several = ", ".join(recipe.name for recipe in RECIPES if recipe.any_chunks)
        raise ArgumentError(
            f"{', '.join(f'{recipe.name} has {recipe.chunks}' for recipe in chosen)} to a rank, and --stages-per-rank "
            f"{','.join(map(str, chunks or ()))} was given.\nTry: --schedule with one of {several}."
        )
    return tuple(found)


def compare_model(captured: Captured, aim: Aim, ranks: int, plans: Sequence[Candidate]) -> Comparison:
    """Price a model once for each recompute, and compare plans. Raises as `compare` does; PlanError if a parameter is
    too large for any rank."""
    aim.check_memory(captured)
    aim = aim.on_ranks(ranks)
    return compare(price_each(captured, aim, plans), aim, ranks, plans)


def price_each(captured: Captured, aim: Aim, plans: Sequence[Candidate]) -> dict[str, Costs]:
    """The prices of a model for each recompute that is among the plans."""
    return {name: replace(aim, recompute=name).price(captured) for name in {plan.recompute: None for plan in plans}}


def compare(prices: Mapping[str, Costs], aim: Aim, ranks: int, plans: Sequence[Candidate]) -> Comparison:
    """Compare plans of a model that is priced for each recompute among them.

    A first look takes, for each plan, the cuts whose slowest stage is the fastest; a second one the best cuts near
    those. Plans that by far do not come up to another are left out each time. The cuts of the others are searched for.

    Raises:
        MemoryShortage: no plan fits the memory; it says which comes closest.
        PlanError: no schedule can have these numbers.
    """
    segments = max(len(costs.segments) for costs in prices.values())
    fewest = min(plans, key=lambda plan: plan.chunks)
    if ranks * fewest.chunks > segments:
        works = segments // fewest.chunks
        raise PlanError(
            f"The model can be cut into {format_number_of('segment', segments)}, and {fewest.schedule} has "
            f"{ranks * fewest.chunks} stages on {ranks} ranks.\nTry: --ranks {works}{' or fewer' if works > 1 else ''}."
        )
    looks, refused = _looks(prices, aim, ranks, plans)
    if not looks:
        hint = "Try: fewer --ranks, or another --schedule or number of --microbatches."
        raise PlanError("\n".join(["No plan can be compared.", *refused, hint]))
    limit = _limit(aim)
    loose = max(_looseness(look.costs.segments, look.schedule.stages) for look in looks)
    near = _worth([look for look in looks if look.peak <= limit * (1 + loose)], limit, loose)
    worth = _worth([_improved(look) for look in near], limit, min(loose, _MOST) * _SECOND)
    found, short = _searched(worth, aim.effort)
    if not found:
        closest = sorted(looks, key=lambda look: look.peak)[:_CLOSEST]
        found, others = _searched(closest, _LOW * aim.effort)
        short += others
    if not found:
        raise _shortage(short, limit)
    best, *rest = _front(found)
    return Comparison((settle(best), *rest), len(looks), refused)


def _looks(
    prices: Mapping[str, Costs], aim: Aim, ranks: int, plans: Sequence[Candidate]
) -> tuple[list[Choice], tuple[str, ...]]:
    """Every candidate that there can be, and why there cannot be others."""
    refused: dict[str, None] = {}
    looks = []
    even: dict[tuple[str, int], tuple[int, ...]] = {}
    for plan in plans:
        costs, stages = prices[plan.recompute], ranks * plan.chunks
        if stages > len(costs.segments):
            why = f"{plan.schedule} has {stages} stages, and the model can be cut into {len(costs.segments)} segments."
            refused[why] = None
            continue
        own = replace(
            aim, schedule=plan.schedule, microbatches=plan.microbatches, ranks=ranks, recompute=plan.recompute
        )
        try:
            schedule = own.arrange(stages)
        except (ScheduleError, PlanError) as error:
            refused[str(error).replace("\n", " ")] = None
            continue
        if (plan.recompute, stages) not in even:
            slowest = solve(costs.segments, stages, "gpipe", 1, objective="bottleneck", alternatives=0, effort=_LOW)
            even[plan.recompute, stages] = slowest.cuts
        looks.append(evaluate(costs, own, even[plan.recompute, stages], schedule))
    return looks, tuple(refused)


def _improved(look: Choice) -> Choice:
    cuts = improve(look.costs.segments, look.cuts, look.schedule, look.aim.link)
    return evaluate(look.costs, look.aim, cuts, look.schedule)


def _looseness(costs: Sequence[SegmentCost], stages: int) -> float:
    """By how much a step may become shorter when its cuts are looked for: about the part of a stage that a middling
    segment is."""
    times = sorted(cost.forward + cost.input_grad + cost.weight_grad for cost in costs)
    part = times[len(times) // 2] * stages / max(sum(times), 1e-30)
    return max(part, _LEAST) if part <= _MOST else math.inf


def _worth(looks: Sequence[Choice], limit: float, margin: float) -> list[Choice]:
    """Those that no other one is better than, by so much in time or memory, where that one fits.

    A faster one may need a little more memory, as `_front` has it in the end.
    """

    def beats(one: Choice, other: Choice) -> bool:
        faster = one.per_microbatch * (1 + margin) <= other.per_microbatch and one.peak * (1 - WORTH) <= other.peak
        leaner = one.per_microbatch <= other.per_microbatch and one.peak * (1 + margin) <= other.peak
        return faster or leaner

    fitting = [look for look in looks if look.peak <= limit]
    return [look for look in looks if not any(beats(other, look) for other in fitting)]


def _searched(looks: Sequence[Choice], effort: float) -> tuple[list[Choice], list[tuple[Choice, MemoryShortage]]]:
    """The cuts of those that fit into the memory, and what the others lack."""
    found, short = [], []
    for look in looks:
        try:
            found.append(choose(look.costs, replace(look.aim, effort=effort), look.schedule.stages))
        except MemoryShortage as shortage:
            short.append((look, shortage))
    return found, short


def _shortage(short: Sequence[tuple[Choice, MemoryShortage]], limit: float) -> MemoryShortage:
    look, least = min(short, key=lambda each: each[1].needed)
    schedule = look.schedule
    return MemoryShortage(
        f"No plan that was compared fits into {format_bytes(limit)} on each rank. The closest is {schedule.name} with "
        f"{schedule.stages} stages, {schedule.microbatches} microbatches and recompute {look.aim.recompute}:\n{least}\n"
        f"Try: --memory {bytes_option(least.needed)}, or more --ranks.",
        least.needed,
    )


def _limit(aim: Aim) -> float:
    if aim.memory_bytes is None:
        return math.inf
    return max(aim.memory_bytes) if isinstance(aim.memory_bytes, Sequence) else aim.memory_bytes


def _front(found: Sequence[Choice]) -> tuple[Choice, ...]:
    """Those that no other is as good as in both, the fastest first.

    As fast is within 0.2 %, as lean within 1 %. Of equals the one with the fewest stages is taken, then the one whose
    schedule is simpler.
    """
    left, front = list(found), list[Choice]()
    while left:
        fastest = min(choice.per_microbatch for choice in left)
        as_fast = [choice for choice in left if choice.per_microbatch <= fastest * (1 + SAME)]
        leanest = min(choice.peak for choice in as_fast)
        chosen = min((choice for choice in as_fast if choice.peak * (1 - WORTH) <= leanest), key=_simplicity)
        front.append(chosen)
        left = [choice for choice in left if choice.peak <= chosen.peak * (1 - WORTH)]
    return tuple(front)


def _simplicity(choice: Choice) -> tuple[int, int, int, float]:
    """Less is simpler: stages, the schedule's place among all, and what the backward computes again."""
    schedule = choice.schedule
    return (
        schedule.stages,
        names().index(schedule.name),
        RECOMPUTE.index(choice.aim.recompute),
        choice.per_microbatch,
    )
