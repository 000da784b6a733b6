"""Checks of what `solve` is given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields

from pipegraph.cost import SegmentCost
from pipegraph.errors import PlanError


def is_figure(value: object) -> bool:
    """Whether it is a number from 0 on, and not infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def check_costs(costs: Sequence[SegmentCost], stages: int, names: Sequence[str] | None) -> None:
    """Raises PlanError for costs that are none, and names the segment; and for more stages than segments."""
    if type(stages) is not int or stages < 1:
        raise PlanError(f"A chain of segments cannot be cut into {stages!r} stages.\nTry: a whole number from 1 on.")
    if names is not None and len(names) != len(costs):
        raise PlanError(f"There are {len(costs)} segments, and {len(names)} names for them.")
    for number, cost in enumerate(costs):
        where = f"Segment {number}" + (f" ({names[number]})" if names else "")
        if not isinstance(cost, SegmentCost):
            raise PlanError(f"{where} has no SegmentCost, but {cost!r}.")
        for field in fields(cost):
            figure = getattr(cost, field.name)
            if not (is_figure(figure) or (figure is None and field.default is None)):
                raise PlanError(f"{where} has {field.name}={figure!r}, and a cost is a number from 0 on.")
        if cost.trained_bytes is not None and cost.trained_bytes > cost.parameter_bytes:
            raise PlanError(
                f"{where} has trained_bytes={cost.trained_bytes!r}, and they are a part of parameter_bytes, "
                f"{cost.parameter_bytes!r}."
            )
    if stages > len(costs):
        raise PlanError(
            f"{len(costs)} segments are too few for {stages} stages, which have one or more each.\n"
            + (
                f"Try: stages={len(costs)} or fewer, or cut inside the segments."
                if costs
                else "Try: a model with layers."
            )
        )


def check_numbers(state_factor: float, receives_ahead: int, alternatives: int, effort: float) -> None:
    """Raises PlanError for numbers that are none."""
    for what, figure in (("state_factor", state_factor), ("effort", effort)):
        if not is_figure(figure):
            raise PlanError(f"{what} is a number from 0 on, not {figure!r}.")
    for what, number in (("receives_ahead", receives_ahead), ("alternatives", alternatives)):
        if type(number) is not int or number < 0:
            raise PlanError(f"{what} is a whole number from 0 on, not {number!r}.")


def byte_limits(memory_bytes: float | Sequence[float] | None, ranks: int) -> tuple[float, ...]:
    """What each rank has; empty where there is no limit. Raises PlanError."""
    if memory_bytes is None:
        return ()
    limits = tuple(memory_bytes) if isinstance(memory_bytes, Iterable) else (memory_bytes,) * ranks
    for limit in limits:
        if not is_figure(limit):
            raise PlanError(f"memory_bytes are numbers of bytes, such as {80 * 2**30}, not {limit!r}.")
    if len(limits) != ranks:
        raise PlanError(f"memory_bytes are one figure, or one for each rank: {ranks}, and {len(limits)} were given.")
    return limits
