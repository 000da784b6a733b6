"""Looped BFS (Breadth-First Pipeline Parallelism, Lamy-Poirier, 2023): all microbatches of a chunk, then the next."""

from __future__ import annotations

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.recipes.recipe import Orders, Recipe


def orders(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Every rank does all F of its chunk 0, of chunk 1 and on; then all B in reverse. It holds all m·v activations.

    rank 0  0F0 0F1 2F0 2F1         2B1 2B0 0B1 0B0
    rank 1      1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    """
    rows = []
    for rank in range(ranks):
        held = [(stage, j) for stage in range(rank, ranks * chunks, ranks) for j in range(microbatches)]
        forwards = [Action(stage, Kind.F, j) for stage, j in held]
        rows.append([*forwards, *(Action(stage, Kind.B, j) for stage, j in reversed(held))])
    return rows


RECIPE = Recipe("looped-bfs", orders, aliases=("LoopedBFS", "ScheduleLoopedBFS"), chunks=2, any_chunks=True)
