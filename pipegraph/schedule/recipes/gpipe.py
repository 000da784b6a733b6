"""All forwards before any backward: GPipe, Looped BFS, and the forward alone."""

from __future__ import annotations

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.recipes.recipe import Orders, Recipe


def gpipe(ranks: int, microbatches: int, chunks: int) -> Orders:
    """GPipe (Huang et al., 2019): every rank does F 0 … m−1, then B 0 … m−1, and holds all m activations in between.

    rank 0  0F0 0F1             0B0 0B1
    rank 1      1F0 1F1     1B0 1B1
    rank 2          2F0 2F1 2B0 2B1
    """
    return [[Action(rank, kind, j) for kind in (Kind.F, Kind.B) for j in range(microbatches)] for rank in range(ranks)]


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Looped BFS (Breadth-First Pipeline Parallelism, Lamy-Poirier, 2023): all microbatches of a chunk, then the next.

    Every rank does all F of chunk 0, then of chunk 1 and so on, then all B in reverse. It holds all m·v activations.

    rank 0  0F0 0F1 2F0 2F1         2B1 2B0 0B1 0B0
    rank 1      1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    """
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(stage, Kind.F, j) for stage in stages for j in range(microbatches)]
        backwards = [Action(action.stage, Kind.B, action.microbatch) for action in reversed(forwards)]
        rows.append(forwards + backwards)
    return rows


def forward(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Evaluation: every rank does F 0 … m−1."""
    return [[Action(rank, Kind.F, j) for j in range(microbatches)] for rank in range(ranks)]


GPIPE = Recipe("gpipe", gpipe, aliases=("ScheduleGPipe",), is_compared=False)
LOOPED_BFS = Recipe(
    "looped-bfs", looped_bfs, aliases=("LoopedBFS", "ScheduleLoopedBFS"), chunks=2, any_chunks=True, is_compared=False
)
FORWARD = Recipe("forward", forward, trains=False, is_compared=False)
