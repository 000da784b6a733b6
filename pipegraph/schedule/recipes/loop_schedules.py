"""The schedules whose stages go around the ranks: GPipe, Looped BFS, 1F1B, zero bubble, and the forward alone."""

from __future__ import annotations

from functools import partial

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.recipes.recipe import Orders, Recipe, alternate, by_groups, groups_of_ranks

# ---- all forwards before any backward --------------------------------------------------------------------------------


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


# ---- one forward, one backward ---------------------------------------------------------------------------------------
# 1F1B, and the zero-bubble schedules, in which weight gradients fill the bubble of 1F1B.


def one_f_one_b(lead: int, ranks: int, microbatches: int, chunks: int, group: int | None = None) -> Orders:
    """Rank r does k(p−1−r) + (v−1)p forwards, then F and B in turn, then the remaining backwards. k is ``lead``.

    With a ``group`` of more than p microbatches, which takes the place of p in this, a rank stays longer with a stage.
    A rank holds one activation more than it does forwards at the start.

    1F1B (PipeDream-Flush, Narayanan et al., 2021), k = 1: early backwards save memory.

    rank 0  0F0 0F1     0B0 0F2 0B1     0B2
    rank 1      1F0 1B0 1F1 1B1 1F2 1B2

    Eager 1F1B (Zhuang et al., 2022), k = 2: transfers overlap with the additional forwards at the start.

    rank 0  0F0 0F1 0F2 0B0     0B1     0B2
    rank 1      1F0 1B0 1F1 1B1 1F2 1B2

    Interleaved 1F1B (Narayanan et al., 2021), k = 2, v stages on a rank: the bubble is v times smaller. Microbatches go
    in groups of p: a group through chunk 0, then through chunk 1 and so on, before the next group starts. Backwards
    take the chunks in reverse.

    rank 0  0F0 0F1 2F0 2F1     2B0     2B1 0B0 0B1
    rank 1      1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    rows, group = [], group or ranks
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards, backwards = (by_groups(kind, stages, microbatches, group) for kind in (Kind.F, Kind.B))
        rows.append(alternate(forwards, backwards, lead * (ranks - 1 - rank) + (chunks - 1) * group))
    return rows


ONE_F_ONE_B = Recipe("1f1b", partial(one_f_one_b, 1), aliases=("Schedule1F1B",))
EAGER = Recipe("eager-1f1b", partial(one_f_one_b, 2), is_compared=False)
INTERLEAVED = Recipe(
    "interleaved-1f1b",
    partial(one_f_one_b, 2),
    aliases=("Interleaved1F1B", "ScheduleInterleaved1F1B"),
    chunks=2,
    any_chunks=True,
    rule=groups_of_ranks,
    grouped=partial(one_f_one_b, 2),
)


def zero_bubble(depth: int, ranks: int, microbatches: int, chunks: int, group: int | None = None) -> Orders:
    """Rank r does k(p−1−r) + (v−1)p forwards, then F and I in turn, with W from the k·r-th I on. k is ``depth``.

    A ``group`` of more than p microbatches takes the place of p, as in `one_f_one_b`.
    So every rank holds k(p−1) + (v−1)p + 1 activations: those of ZB-H1 are the p of 1F1B's first rank.

    ZB-H1, k = 1, and ZB-H2, k = 2 (Zero Bubble Pipeline Parallelism, Qi et al., 2023). This is ZB-H1:

    rank 0  0F0 0F1     0I0 0W0 0F2 0I1 0W1 0I2 0W2
    rank 1      1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Interleaved zero bubble, k = 1, v stages on a rank, as torch has it: microbatches go in groups of p, as in
    interleaved 1F1B.

    rank 0  0F0 0F1 2F0 2F1     2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    rank 1      1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    rows, group = [], group or ranks
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards, backwards, weights = (
            by_groups(kind, stages, microbatches, group) for kind in (Kind.F, Kind.I, Kind.W)
        )
        warm_up = depth * (ranks - 1 - rank) + (chunks - 1) * group
        rows.append(alternate(forwards, backwards, warm_up, weights, depth * rank))
    return rows


ZB_H1 = Recipe("zb-h1", partial(zero_bubble, 1))
ZB_H2 = Recipe("zb-h2", partial(zero_bubble, 2))
INTERLEAVED_ZB = Recipe(
    "interleaved-zb",
    partial(zero_bubble, 1),
    aliases=("InterleavedZeroBubble", "ScheduleInterleavedZeroBubble"),
    is_compared=False,
    chunks=2,
    any_chunks=True,
    rule=groups_of_ranks,
    grouped=partial(zero_bubble, 1),
)
