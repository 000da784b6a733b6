"""What makes a schedule known by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipegraph.schedule.action import Action
from pipegraph.schedule.placement import loop

Orders = Sequence[Sequence[Action]]
"""The actions of each rank, in order."""

Rule = Callable[[int, int], str]
"""Of (ranks, microbatches): why the schedule cannot have them and which numbers would do, or an empty string."""


def every_number(ranks: int, microbatches: int) -> str:
    return ""


def groups_of_ranks(ranks: int, microbatches: int) -> str:
    """The rule of the interleaved schedules."""
    if microbatches % ranks == 0:
        return ""
    full = microbatches // ranks * ranks
    small = [number for number in range(1, math.isqrt(microbatches) + 1) if microbatches % number == 0]
    divisors = sorted({*small, *(microbatches // number for number in small)})
    below, above = [number for number in divisors if number < ranks], [number for number in divisors if number > ranks]
    multiples = counted([full, full + ranks] if full else [ranks], "microbatch")
    return (
        "microbatches go in groups of as many as there are ranks, so their number must be a multiple of that. Give "
        f"{multiples}, or {counted(below[-1:] + above[:1], 'rank')}."
    )


def full_pipeline(offset: int) -> Rule:
    """The rule of the schedules in a V: there are 2 · ranks + offset microbatches or more."""

    def rule(ranks: int, microbatches: int) -> str:
        least, most = 2 * ranks + offset, (microbatches - offset) // 2
        if microbatches >= least:
            return ""
        formula = f"2 × ranks − {-offset}" if offset else "2 × ranks"
        fewer = f", or {counted([most], 'rank')}{' or fewer' if most > 1 else ''}" if most else ""
        needed = counted([least], "microbatch")
        return f"it needs a full pipeline, {formula} = {needed} or more. Give {needed}{fewer}."

    return rule


def counted(numbers: Sequence[int], noun: str) -> str:
    """``8 or 12 microbatches``"""
    plural = "" if [*numbers] == [1] else "es" if noun.endswith("h") else "s"
    return f"{' or '.join(map(str, numbers))} {noun}{plural}"


def no_pairs(orders: Orders) -> Iterable[tuple[Action, Action]]:
    return ()


@dataclass(frozen=True)
class Recipe:
    """A schedule's name, and how to make the orders of all ranks from (ranks, microbatches, chunks).

    ``chunks`` is the number of stages on a rank; where ``any_chunks`` holds, that is only what it is if none is asked
    for. ``aliases`` are other names, found in any case of letters. ``overlapped`` finds in the orders the pairs of an F
    and a B that are meant to run at the same time.
    """

    name: str
    orders: Callable[[int, int, int], Orders]
    aliases: tuple[str, ...] = ()
    chunks: int = 1
    any_chunks: bool = False
    placement: Callable[[int, int], tuple[int, ...]] = loop
    rule: Rule = every_number
    trains: bool = True
    overlapped: Callable[[Orders], Iterable[tuple[Action, Action]]] = no_pairs
