"""The arguments of `solve`, checked: costs, numbers, memory, and the schedule of a number of stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from types import NoneType

from pipegraph.arguments import argument, require_type
from pipegraph.cost import SegmentCost, TransientBytes
from pipegraph.errors import ArgumentError, PlanError, nearest
from pipegraph.schedule import PLACEMENTS, Schedule, check
from pipegraph.schedule.build import schedule_for_stages
from pipegraph.schedule.lower import without_transfers
from pipegraph.units import format_bytes, format_number_of, parse_bytes, parse_rank_bytes


def _is_figure(value: object) -> bool:
    """Return whether this is a finite number from 0 on."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def check_costs(costs: Sequence[SegmentCost], stages: int, names: Sequence[str] | None) -> None:
    """Raise PlanError for impossible costs, naming the segment, and for more stages than segments."""
    of_segments = "pipegraph.cost.price.price gives those of a captured model"
    require_type(costs, Sequence, "solve() takes a SegmentCost for each segment", of_segments, PlanError)
    require_type(names, (Sequence, NoneType), "names has a name for each segment", error=PlanError)
    if type(stages) is not int or stages < 1:
        raise PlanError(f"A chain of segments cannot be cut into {stages!r} stages.", "a whole number from 1 on.")
    if names is not None and len(names) != len(costs):
        raise PlanError(f"There are {len(costs)} segments, and {len(names)} names for them.")
    for number, cost in enumerate(costs):
        where = f"Segment {number}" + (f" ({names[number]})" if names else "")
        if not isinstance(cost, SegmentCost):
            raise PlanError(f"{where} has no SegmentCost, but {cost!r}.")
        for field in fields(cost):
            figure = getattr(cost, field.name)
            figures = figure if isinstance(figure, TransientBytes) else (figure,)
            if not (all(map(_is_figure, figures)) or (figure is None and field.default is None)):
                raise PlanError(f"{where} has {field.name}={figure!r}, and a cost is a number from 0 on.")
        if cost.trained_bytes is not None and cost.trained_bytes > cost.parameter_bytes:
            raise PlanError(
                f"{where} has trained_bytes={cost.trained_bytes!r}, and they are a part of parameter_bytes, "
                f"{cost.parameter_bytes!r}."
            )
        if cost.added > cost.trained:
            raise PlanError(
                f"{where} has added_bytes={cost.added!r}, and they are a part of trained_bytes, {cost.trained!r}."
            )
    check_stages(len(costs), stages)


def check_stages(segments: int, stages: int) -> None:
    """Raise PlanError for more stages than segments."""
    if stages > segments:
        advice = f"stages={segments} or fewer, or cut inside the segments." if segments else "a model with layers."
        raise PlanError(f"{segments} segments are too few for {stages} stages, which have one or more each.", advice)


def check_numbers(effort: float, receives_ahead: int = 0, alternatives: int = 0) -> None:
    """Raise PlanError for impossible numbers."""
    if not _is_figure(effort):
        raise PlanError(f"effort is a number from 0 on, not {effort!r}.")
    for name, number in (("receives_ahead", receives_ahead), ("alternatives", alternatives)):
        if type(number) is not int or number < 0:
            raise PlanError(f"{name} is a whole number from 0 on, not {number!r}.")


def parse_memory(memory_bytes: float | str | Sequence[float | str] | None) -> float | tuple[float, ...] | None:
    """Return bytes, of which each may be written as `parse_bytes` reads it, or all as `parse_rank_bytes` does. Raises
    ArgumentError."""
    if isinstance(memory_bytes, str):
        try:
            return parse_rank_bytes(memory_bytes)
        except ValueError as error:
            raise ArgumentError(str(error)) from None
    if isinstance(memory_bytes, Iterable):
        limits = tuple(_bytes(limit) for limit in memory_bytes)
        if not limits:
            raise ArgumentError("memory_bytes is empty.", 'memory_bytes="80GiB", or one figure for each rank.')
        return limits
    return None if memory_bytes is None else _bytes(memory_bytes)


def _bytes(limit: float | str) -> float:
    if isinstance(limit, str):
        try:
            return parse_bytes(limit)
        except ValueError as error:
            raise ArgumentError(str(error)) from None
    if not _is_figure(limit):
        raise ArgumentError(
            f"memory_bytes are numbers of bytes, not {limit!r}.", f'memory_bytes={80 * 2**30}, or "80GiB".'
        )
    return limit


def memory_of_ranks(memory_bytes: float | str | Sequence[float | str] | None, ranks: int) -> tuple[float, ...]:
    """Return the bytes that each rank has; an empty tuple if there is no limit. Raises ArgumentError."""
    memory = parse_memory(memory_bytes)
    if memory is None:
        return ()
    limits = memory if isinstance(memory, tuple) else (memory,) * ranks
    if len(limits) != ranks:
        raise ArgumentError(
            f"memory_bytes are one figure, or one for each rank: {ranks}, and {len(limits)} were given."
        )
    return limits


def memory_text(limits: Sequence[float]) -> str:
    """Return ``80.0 GiB on each rank``, or ``40.0 GiB to 80.0 GiB on a rank``."""
    low, high = min(limits), max(limits)
    return (
        f"{format_bytes(high)} on each rank"
        if low == high
        else f"{format_bytes(low)} to {format_bytes(high)} on a rank"
    )


def resolve_schedule(
    schedule: str | Schedule, stages: int, microbatches: int, placement: str | None, ranks: int | None
) -> Schedule:
    """Return the schedule for ``stages`` stages, checked and without transfers.

    Args:
        schedule: a name, which gets the number of ranks that the stages need; or a schedule, which has its own ranks
            and microbatches.
        stages, microbatches: the numbers of a step.
        placement, ranks: the placement and number of ranks that the schedule must have; None for any.

    Raises:
        ScheduleError: an unknown name, numbers that the schedule cannot have, or a schedule that is wrong.
        PlanError: the schedule has another placement, or another number of ranks.
    """
    if isinstance(schedule, Schedule):  # costs say what crosses boundaries, so transfers and edges are left out
        schedule = without_transfers(schedule)
        check(schedule)
    resolved = schedule_for_stages(schedule, stages, microbatches, ranks)
    if ranks not in (None, resolved.ranks):
        alternative = ""
        if type(ranks) is int and ranks > 0:
            alternative = f", or {format_number_of('stage', ranks * resolved.stages // resolved.ranks)}"
        raise PlanError(
            f"{resolved.name} has {format_number_of('stage', stages)} on "
            f"{format_number_of('rank', resolved.ranks)}, not on {ranks}.",
            f"{argument('ranks', resolved.ranks)}{alternative}.",
        )
    if placement is not None:
        _check_placement(resolved, placement)
    return resolved


def _check_placement(schedule: Schedule, placement: str) -> None:
    kind = PLACEMENTS.get(str(placement).casefold())
    if kind is None:
        raise PlanError(
            f'There is no placement "{placement}".{nearest(str(placement), PLACEMENTS)} '
            f"The placements are {', '.join(PLACEMENTS)}."
        )
    if kind.places(schedule.ranks, schedule.stages // schedule.ranks) != schedule.placement:
        raise PlanError(
            f"{schedule.name} places its stages on the ranks {', '.join(map(str, schedule.placement))}, which is not "
            f'the placement "{placement}".',
            "leave placement out, or another schedule.",
        )
