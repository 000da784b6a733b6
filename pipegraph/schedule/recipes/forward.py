"""Forward only: evaluation."""

from __future__ import annotations

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.recipes.recipe import Orders, Recipe


def orders(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Every rank does F 0 … m−1."""
    return [[Action(rank, Kind.F, j) for j in range(microbatches)] for rank in range(ranks)]


RECIPE = Recipe("forward", orders)
