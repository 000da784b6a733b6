"""Interleaved 1F1B (Narayanan et al., 2021): several stages on a rank make the bubble as many times smaller."""

from __future__ import annotations

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.recipes.order import alternate
from pipegraph.schedule.recipes.recipe import Orders, Recipe, groups_of_ranks


def orders(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Rank r does 2(p−1−r) + (v−1)p forwards, then F and B in turn, then the backwards that are left.

    Microbatches go in groups of p: a group through chunk 0, then through chunk 1 and on, before the next group starts.
    Backwards take the chunks in reverse. One activation more than there are forwards at the start is held.

    rank 0  0F0 0F1 2F0 2F1     2B0     2B1 0B0 0B1
    rank 1      1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    rows = []
    for rank in range(ranks):
        warm_up = 2 * (ranks - 1 - rank) + (chunks - 1) * ranks
        rows.append(
            alternate(
                grouped(Kind.F, rank, ranks, microbatches, chunks),
                grouped(Kind.B, rank, ranks, microbatches, chunks),
                warm_up,
            )
        )
    return rows


def grouped(kind: Kind, rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """The actions of this kind on a rank: each group of ``ranks`` microbatches through all chunks, then the next."""
    stages = range(rank, ranks * chunks, ranks)
    return [
        Action(stage, kind, first + j)
        for first in range(0, microbatches, ranks)
        for stage in (stages if kind is Kind.F else reversed(stages))
        for j in range(ranks)
    ]


RECIPE = Recipe(
    "interleaved-1f1b",
    orders,
    aliases=("Interleaved1F1B", "ScheduleInterleaved1F1B"),
    chunks=2,
    any_chunks=True,
    rule=groups_of_ranks,
)
