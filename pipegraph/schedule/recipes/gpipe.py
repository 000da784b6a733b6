"""GPipe (Huang et al., 2019): all forwards, then all backwards."""

from __future__ import annotations

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.recipes.recipe import Orders, Recipe


def orders(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Every rank does F 0 … m−1, then B 0 … m−1, and holds all m activations in between.

    rank 0  0F0 0F1             0B0 0B1
    rank 1      1F0 1F1     1B0 1B1
    rank 2          2F0 2F1 2B0 2B1
    """
    return [[Action(rank, kind, j) for kind in (Kind.F, Kind.B) for j in range(microbatches)] for rank in range(ranks)]


RECIPE = Recipe("gpipe", orders, aliases=("ScheduleGPipe",))
