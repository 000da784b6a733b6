"""The description of a named schedule, and what puts the order of one of its ranks together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.stages import loop
from pipegraph.units import format_number_of

Orders = Sequence[Sequence[Action]]
"""The actions of each rank, in order."""


class WrongNumbers(NamedTuple):
    """Why a schedule cannot have these numbers of ranks and microbatches, and which of one of them it can have."""

    why: str
    microbatches: str
    ranks: str = ""


Rule = Callable[[int, int], WrongNumbers | None]
"""(ranks, microbatches) → why the schedule cannot have them; None if it can"""

Step = tuple[int, Kind]
"""(stage, kind): the next microbatch of it"""


def every_number(ranks: int, microbatches: int) -> None:
    return None


def groups_of_ranks(ranks: int, microbatches: int) -> WrongNumbers | None:
    """Rule of the interleaved schedules: the number of microbatches is a multiple of that of ranks."""
    if microbatches % ranks == 0:
        return None
    full = microbatches // ranks * ranks
    small = [number for number in range(1, math.isqrt(microbatches) + 1) if microbatches % number == 0]
    divisors = sorted({*small, *(microbatches // number for number in small)})
    below, above = [number for number in divisors if number < ranks], [number for number in divisors if number > ranks]
    why = "microbatches go in groups of as many as there are ranks, so their number must be a multiple of that."
    multiples = format_number_of("microbatch", *([full, full + ranks] if full else [ranks]))
    return WrongNumbers(why, multiples, format_number_of("rank", *below[-1:], *above[:1]))


def full_pipeline(offset: int) -> Rule:
    """Rule of the schedules in a V: there are 2 · ranks + offset microbatches or more."""

    def rule(ranks: int, microbatches: int) -> WrongNumbers | None:
        least, most = 2 * ranks + offset, (microbatches - offset) // 2
        if microbatches >= least:
            return None
        formula, minimum = f"2 × ranks − {-offset}" if offset else "2 × ranks", format_number_of("microbatch", least)
        fewer = f"{format_number_of('rank', most)}{' or fewer' if most > 1 else ''}" if most else ""
        return WrongNumbers(f"it needs a full pipeline, {formula} = {minimum} or more.", minimum, fewer)

    return rule


def no_pairs(orders: Orders) -> Iterable[tuple[Action, Action]]:
    return ()


@dataclass(frozen=True)
class Recipe:
    """A schedule known by name.

    Attributes:
        name, aliases: found in upper or lower case.
        orders: (ranks, microbatches, chunks) → the actions of each rank, in order.
        chunks: stages on a rank; if ``any_chunks``, this is the default, and another number can be asked for.
        placement: (ranks, chunks) → the rank of each stage.
        grouped: (ranks, microbatches, chunks, group) → the actions of each rank if groups of more microbatches than
            ranks pass a stage before a rank goes to its next; None if the schedule has no groups.
        rule: which numbers of ranks and microbatches it can have.
        trains: whether it has a backward.
        overlapped: orders → the pairs of an F and a B that are meant to run at the same time.
        is_compared: whether plans for a cluster compare it by default. A schedule that is slower than another one of
            equal memory, or that costs memory for a small gain, only makes that search longer.
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
    is_compared: bool = True
    grouped: Callable[[int, int, int, int], Orders] | None = None


def by_groups(kind: Kind, stages: Sequence[int], microbatches: int, group: int) -> list[Action]:
    """Return a rank's actions of one kind: each ``group`` of microbatches through all of its stages, then the next."""
    return [
        Action(stage, kind, j)
        for first in range(0, microbatches, group)
        for stage in (stages if kind is Kind.F else reversed(stages))
        for j in range(first, min(first + group, microbatches))
    ]


def alternate(
    forwards: Sequence[Action],
    backwards: Sequence[Action],
    warm_up: int,
    weights: Sequence[Action] = (),
    delay: int = 0,
) -> list[Action]:
    """Return ``warm_up`` forwards, then a forward and a backward in turn, then the remaining backwards.

    From the backward numbered ``delay`` on (from 0), one of ``weights`` follows each; the rest of them come last.
    """
    order = list(forwards[:warm_up])
    for number, backward in enumerate(backwards):
        order += forwards[warm_up + number : warm_up + number + 1]
        order.append(backward)
        if number >= delay:
            order += weights[number - delay : number - delay + 1]
    return [*order, *weights[max(0, len(backwards) - delay) :]]


class Order:
    """The order of one rank, written in steps. Every step is of the next microbatch of its stage and kind.

    A B is the next I and the next W of its stage in one.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: defaultdict[Step, int] = defaultdict(int)

    def add(self, stage: int, kind: Kind) -> None:
        microbatch = self._next[stage, Kind.I if kind is Kind.B else kind]
        self.actions.append(Action(stage, kind, microbatch))
        for part in (Kind.I, Kind.W) if kind is Kind.B else (kind,):
            self._next[stage, part] += 1

    def repeat(self, times: int, *steps: Step) -> None:
        for _ in range(times):
            for stage, kind in steps:
                self.add(stage, kind)
