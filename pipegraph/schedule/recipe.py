"""What makes a schedule known by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipegraph.schedule.action import Action

Orders = Sequence[Sequence[Action]]
"""The actions of each rank, in order."""


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stages go round the ranks: stage s is on rank s mod ranks."""
    return tuple(range(ranks)) * chunks


@dataclass(frozen=True)
class Recipe:
    """A schedule's name, and how to make the orders of all ranks from (ranks, microbatches, chunks).

    ``chunks`` is the number of stages on a rank. ``aliases`` are other names, found in any case of letters.
    """

    name: str
    orders: Callable[[int, int, int], Orders]
    aliases: tuple[str, ...] = ()
    chunks: int = 1
    placement: Callable[[int, int], tuple[int, ...]] = loop
