"""Eager 1F1B (Zhuang et al., 2022): twice the forwards of 1F1B at the start, so that transfers hide behind them."""

from __future__ import annotations

from pipegraph.schedule.recipes.one_f_one_b import one_f_one_b
from pipegraph.schedule.recipes.recipe import Orders, Recipe


def orders(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Rank r does 2(p−1−r) forwards, then F and B in turn: it holds 2(p−1−r)+1 activations.

    rank 0  0F0 0F1 0F2 0B0     0B1     0B2
    rank 1      1F0 1B0 1F1 1B1 1F2 1B2
    """
    return [one_f_one_b(rank, 2 * (ranks - 1 - rank), microbatches) for rank in range(ranks)]


RECIPE = Recipe("eager-1f1b", orders)
