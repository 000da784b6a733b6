"""ZB-H1, ZB-H2 and interleaved zero bubble: weight gradients fill the bubble of 1F1B."""

from __future__ import annotations

from functools import partial

from pipegraph.schedule.action import Kind
from pipegraph.schedule.recipes.order import alternate, by_groups
from pipegraph.schedule.recipes.recipe import Orders, Recipe, groups_of_ranks


def orders(depth: int, ranks: int, microbatches: int, chunks: int) -> Orders:
    """Rank r does k(p−1−r) + (v−1)p forwards, then F and I in turn, with W from the k·r-th I on. k is ``depth``.

    So every rank holds k(p−1) + (v−1)p + 1 activations: those of ZB-H1 are the p of 1F1B's first rank.

    ZB-H1, k = 1, and ZB-H2, k = 2 (Zero Bubble Pipeline Parallelism, Qi et al., 2023). This is ZB-H1:

    rank 0  0F0 0F1     0I0 0W0 0F2 0I1 0W1 0I2 0W2
    rank 1      1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Interleaved zero bubble, k = 1, v stages on a rank, as torch has it: microbatches go in groups of p, as in
    interleaved 1F1B.

    rank 0  0F0 0F1 2F0 2F1     2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    rank 1      1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    rows = []
    for rank in range(ranks):
        forwards, backwards, weights = (
            by_groups(kind, rank, ranks, microbatches, chunks) for kind in (Kind.F, Kind.I, Kind.W)
        )
        warm_up = depth * (ranks - 1 - rank) + (chunks - 1) * ranks
        rows.append(alternate(forwards, backwards, warm_up, weights, depth * rank))
    return rows


ZB_H1 = Recipe("zb-h1", partial(orders, 1))
ZB_H2 = Recipe("zb-h2", partial(orders, 2))
INTERLEAVED_ZB = Recipe(
    "interleaved-zb",
    partial(orders, 1),
    aliases=("InterleavedZeroBubble", "ScheduleInterleavedZeroBubble"),
    chunks=2,
    any_chunks=True,
    rule=groups_of_ranks,
)
