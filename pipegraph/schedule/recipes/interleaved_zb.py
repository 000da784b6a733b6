"""Interleaved zero bubble: the ZB-H1 of Qi et al. (2023) with several stages on a rank, as torch has it."""

from __future__ import annotations

from pipegraph.schedule.action import Kind
from pipegraph.schedule.recipes.interleaved import grouped
from pipegraph.schedule.recipes.order import alternate
from pipegraph.schedule.recipes.recipe import Orders, Recipe, groups_of_ranks


def orders(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Rank r does (p−1−r) + (v−1)p forwards, then F and I in turn, with W from the r-th I on: it holds p·v activations.

    Microbatches go in groups of p, as in interleaved 1F1B. With one chunk this is ZB-H1.

    rank 0  0F0 0F1 2F0 2F1     2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    rank 1      1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    rows = []
    for rank in range(ranks):
        forwards, backwards, weights = (
            grouped(kind, rank, ranks, microbatches, chunks) for kind in (Kind.F, Kind.I, Kind.W)
        )
        rows.append(alternate(forwards, backwards, ranks - 1 - rank + (chunks - 1) * ranks, weights, rank))
    return rows


RECIPE = Recipe(
    "interleaved-zb",
    orders,
    aliases=("InterleavedZeroBubble", "ScheduleInterleavedZeroBubble"),
    chunks=2,
    any_chunks=True,
    rule=groups_of_ranks,
)
