"""Checks of what a plan is asked for, before anything is captured or priced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from pipegraph.cost.price import UNITS
from pipegraph.errors import PlanError, nearest
from pipegraph.kernels.registry import RECOMPUTE
from pipegraph.planner.solver.solve_arguments import is_figure
from pipegraph.units import parse_bytes

UNIFORM = "uniform"
"""The balance that prices nothing: equal numbers of segments."""


class ArgumentError(PlanError):
    """An argument that no model could be planned with."""

    exit_code: ClassVar[int] = 2


def memory_limits(memory_bytes: float | str | Sequence[float | str] | None) -> float | tuple[float, ...] | None:
    """What ranks have, in bytes: of each figure or size as `parse_bytes` reads it. Raises ArgumentError."""
    if memory_bytes is None:
        return None
    if isinstance(memory_bytes, str):
        return _limit(memory_bytes)
    if isinstance(memory_bytes, Iterable):
        limits = tuple(_limit(each) for each in memory_bytes)
        if not limits:
            raise ArgumentError('memory_bytes is empty.\nTry: memory_bytes="80GiB", or one figure for each rank.')
        return limits
    return _limit(memory_bytes)


def _limit(limit: float | str) -> float:
    if isinstance(limit, str):
        try:
            return parse_bytes(limit)
        except ValueError as error:
            raise ArgumentError(str(error)) from None
    if not is_figure(limit):
        raise ArgumentError(
            f'memory_bytes are numbers of bytes, not {limit!r}.\nTry: memory_bytes={80 * 2**30}, or "80GiB".'
        )
    return limit


def check_number(name: str, number: object, example: int) -> None:
    """Raises ArgumentError for what is no whole number from 1 on."""
    if type(number) is not int or number < 1:
        raise ArgumentError(f"{name} is a whole number from 1 on, not {number!r}.\nTry: {name}={example}.")


def check_balance(balance: object) -> None:
    """Raises ArgumentError for a balance that there is not. Whether ``type:`` matches is seen in the model."""
    name, colon, pattern = str(balance).partition(":")
    if name not in (*UNITS, UNIFORM) or bool(colon) != (name == "type") or (name == "type" and not pattern):
        known = [f"{each}:REGEX" if each == "type" else each for each in (*UNITS, UNIFORM)]
        raise ArgumentError(
            f'Stages cannot be balanced by "{balance}".{nearest(str(balance), known)}\n'
            f"Try: --balance with one of {', '.join(known)}."
        )


def check_recompute(recompute: object) -> None:
    """Raises ArgumentError for a recompute that there is not."""
    if recompute not in RECOMPUTE:
        raise ArgumentError(
            f'recompute cannot be "{recompute}".{nearest(str(recompute), RECOMPUTE)} There are: {", ".join(RECOMPUTE)}.'
        )
