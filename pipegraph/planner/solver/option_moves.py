"""What a search for cuts and options tries: every candidate, neighbours of one, and some random moves away."""

from __future__ import annotations

from itertools import combinations, islice, product
from random import Random

import numpy as np

from pipegraph.planner.solver.local_search import Moves, has_no_empty_stage, moved_at_random, neighbours
from pipegraph.planner.solver.prefix_sums import Booleans, Integers

_BATCH = 4096
_CLOSE = 3  # options next to a stage's own, in order of what they keep, that are tried together with a moved cut


def every_candidate(segments: int, may: Booleans) -> list[Integers]:
    """Return all candidates, in batches (candidates, numbers)."""
    choices = product(*(np.flatnonzero(row).tolist() for row in may))
    rows = ((*cuts, *chosen) for chosen in choices for cuts in combinations(range(1, segments), len(may) - 1))
    batches = []
    while batch := list(islice(rows, _BATCH)):
        batches.append(np.array(batch, np.int64))
    return batches


def option_moves(may: Booleans) -> Moves:
    """Moves of cuts, of the options of single stages, and of a cut with the options of a stage beside it."""
    stages = len(may)

    def near(candidate: Integers, segments: int) -> Integers:
        cuts, chosen = candidate[: stages - 1], candidate[stages - 1 :]
        moved = neighbours(cuts, segments)
        rows = [np.column_stack([moved, np.tile(chosen, (len(moved), 1))])]
        stage, option = np.nonzero(may)
        changed = np.tile(candidate, (len(stage), 1))
        changed[np.arange(len(stage)), stages - 1 + stage] = option
        rows.append(changed[option != chosen[stage]])
        close = np.abs(option - chosen[stage]) <= _CLOSE
        for side in (0, 1):  # the cut before the stage, and the one after it
            cut = stage - 1 + side
            inside = close & (cut >= 0) & (cut < stages - 1) & (option != chosen[stage])
            for step in (-1, 1):
                candidates = changed[inside].copy()
                candidates[np.arange(len(candidates)), cut[inside]] += step
                rows.append(candidates[has_no_empty_stage(candidates[:, : stages - 1], segments)])
        every: Integers = np.concatenate(rows)
        return every

    def at_random(random: Random, candidate: Integers, segments: int) -> Integers:
        moved = candidate.copy()
        if stages > 1:
            moved[: stages - 1] = moved_at_random(random, candidate[: stages - 1], segments)
        stage = random.randrange(stages)
        moved[stages - 1 + stage] = random.choice(np.flatnonzero(may[stage]).tolist())
        return moved

    return Moves(near, at_random)
