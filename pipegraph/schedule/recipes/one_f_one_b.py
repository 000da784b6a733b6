"""One forward, one backward: 1F1B, eager 1F1B and interleaved 1F1B."""

from __future__ import annotations

from functools import partial

from pipegraph.schedule.action import Kind
from pipegraph.schedule.recipes.order import alternate, by_groups
from pipegraph.schedule.recipes.recipe import Orders, Recipe, groups_of_ranks


def orders(lead: int, ranks: int, microbatches: int, chunks: int) -> Orders:
    """Rank r does k(p−1−r) + (v−1)p forwards, then F and B in turn, then the remaining backwards. k is ``lead``.

    A rank holds one activation more than it does forwards at the start.

    1F1B (PipeDream-Flush, Narayanan et al., 2021), k = 1: early backwards save memory.

    rank 0  0F0 0F1     0B0 0F2 0B1     0B2
    rank 1      1F0 1B0 1F1 1B1 1F2 1B2

    Eager 1F1B (Zhuang et al., 2022), k = 2: transfers hide behind the additional forwards at the start.

    rank 0  0F0 0F1 0F2 0B0     0B1     0B2
    rank 1      1F0 1B0 1F1 1B1 1F2 1B2

    Interleaved 1F1B (Narayanan et al., 2021), k = 2, v stages on a rank: the bubble is v times smaller. Microbatches go
    in groups of p: a group through chunk 0, then through chunk 1 and so on, before the next group starts. Backwards
    take the chunks in reverse.

    rank 0  0F0 0F1 2F0 2F1     2B0     2B1 0B0 0B1
    rank 1      1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    rows = []
    for rank in range(ranks):
        forwards, backwards = (by_groups(kind, rank, ranks, microbatches, chunks) for kind in (Kind.F, Kind.B))
        rows.append(alternate(forwards, backwards, lead * (ranks - 1 - rank) + (chunks - 1) * ranks))
    return rows


ONE_F_ONE_B = Recipe("1f1b", partial(orders, 1), aliases=("Schedule1F1B",))
EAGER = Recipe("eager-1f1b", partial(orders, 2))
INTERLEAVED = Recipe(
    "interleaved-1f1b",
    partial(orders, 2),
    aliases=("Interleaved1F1B", "ScheduleInterleaved1F1B"),
    chunks=2,
    any_chunks=True,
    rule=groups_of_ranks,
)
