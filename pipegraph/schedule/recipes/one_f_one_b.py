"""1F1B (PipeDream-Flush, Narayanan et al., 2021): one forward, one backward, with early backwards to save memory."""

from __future__ import annotations

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.recipes.order import alternate
from pipegraph.schedule.recipes.recipe import Orders, Recipe


def orders(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Rank r does p−1−r forwards, then F and B in turn, then the backwards that are left: it holds p−r activations.

    rank 0  0F0 0F1     0B0 0F2 0B1     0B2
    rank 1      1F0 1B0 1F1 1B1 1F2 1B2
    """
    return [one_f_one_b(rank, ranks - 1 - rank, microbatches) for rank in range(ranks)]


def one_f_one_b(stage: int, warm_up: int, microbatches: int) -> list[Action]:
    """The order of a rank with one stage, which does so many forwards before its first backward's own."""
    forwards = [Action(stage, Kind.F, j) for j in range(microbatches)]
    backwards = [Action(stage, Kind.B, j) for j in range(microbatches)]
    return alternate(forwards, backwards, warm_up)


RECIPE = Recipe("1f1b", orders, aliases=("Schedule1F1B",))
