"""Cuts that make stages as even as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipegraph.cost import SegmentCost
from pipegraph.planner.solver.prefix_sums import Booleans, Floats, Integers, PrefixSums
from pipegraph.planner.solver.search.cut_space import CutSpace
from pipegraph.planner.solver.search.incumbents import EQUAL
from pipegraph.planner.solver.search.local_search import without_empty_stages

_FLOPS_SHARE = 1e-9  # how much evenness in operations counts, compared with evenness in weight


def equal_parts(sums: PrefixSums, stages: int, quantities: Sequence[int]) -> Integers:
    """Return the cuts nearest to equal parts of the sum of these quantities."""
    before = sums.before[list(quantities)].sum(axis=0)
    targets = before[-1] * np.arange(1, stages) / stages
    return without_empty_stages(np.abs(before - targets[:, None]).argmin(axis=1), sums.segments)


def most_even_cuts(costs: Sequence[SegmentCost], stages: int, largest: float) -> tuple[int, ...]:
    """Return the most even of all cuts of which no stage weighs more than ``largest``; there must be such cuts.

    The most even cuts have the least sum of squares of weights (a stage's F + I + W); of equal ones, of operations.
    """
    weights = [cost.forward + cost.input_grad + cost.weight_grad for cost in costs]
    weight, limit = _shares_before(weights), largest / (sum(weights) or 1.0) * (1 + EQUAL)
    work = _shares_before([float(cost.flops) for cost in costs])

    def is_light(stage: int, begins: Integers, ends: Integers) -> Booleans:
        allowed: Booleans = weight[ends][:, None] - weight[begins] <= limit
        return allowed

    def squares(stage: int, begins: Integers, ends: Integers) -> Floats:
        unevenness: Floats = (weight[ends][:, None] - weight[begins]) ** 2
        return unevenness + _FLOPS_SHARE * (work[ends][:, None] - work[begins]) ** 2

    return tuple(CutSpace.all_cuts(len(costs), stages).restrict(is_light).cheapest(squares, np.add).tolist())


def _shares_before(figures: Sequence[float]) -> Floats:
    """Return the sum before each edge, as a part of the whole."""
    sums: Floats = np.concatenate([[0.0], np.cumsum(figures)])
    return sums / (sums[-1] or 1.0)
