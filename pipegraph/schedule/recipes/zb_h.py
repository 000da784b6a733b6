"""ZB-H1 and ZB-H2 (Zero Bubble Pipeline Parallelism, Qi et al., 2023): weight gradients fill the bubble of 1F1B."""

from __future__ import annotations

from functools import partial

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.recipes.order import alternate
from pipegraph.schedule.recipes.recipe import Orders, Recipe


def orders(depth: int, ranks: int, microbatches: int, chunks: int) -> Orders:
    """Rank r does k(p−1−r) forwards, then F and I in turn, with W from the k·r-th I on: k is ``depth``.

    So every rank holds k(p−1)+1 activations: those of H1 are the p of 1F1B's first rank.

    rank 0  0F0 0F1     0I0 0W0 0F2 0I1 0W1 0I2 0W2
    rank 1      1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    rows = []
    for rank in range(ranks):
        forwards, backwards, weights = (
            [Action(rank, kind, j) for j in range(microbatches)] for kind in (Kind.F, Kind.I, Kind.W)
        )
        rows.append(alternate(forwards, backwards, depth * (ranks - 1 - rank), weights, depth * rank))
    return rows


H1 = Recipe("zb-h1", partial(orders, 1))
H2 = Recipe("zb-h2", partial(orders, 2))
