"""How many saved activations a schedule holds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pipegraph.schedule.arrays import B, F, Integers, W
from pipegraph.schedule.schedule import Schedule


def held_activations(schedule: Schedule) -> list[Integers]:
    """Of each rank, how many activations it holds while each of its actions runs.

    One activation is what one stage saves for one microbatch, held from the start of its F to the end of its W or B.
    Without a backward nothing is saved.
    """
    arrays = schedule.arrays
    saves = (arrays.kind == F) & schedule.has_backward
    frees = (arrays.kind == W) | (arrays.kind == B)
    rows = [(saves[first:last], frees[first:last]) for first, last in pairwise(arrays.bounds)]
    return [np.cumsum(saved) - np.cumsum(freed) + freed for saved, freed in rows]


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Of each rank, the most activations it holds at one time."""
    return tuple(int(held.max(initial=0)) for held in held_activations(schedule))
