"""Which of many equally good cuts to take where a weight is balanced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipegraph.cost import SegmentCost
from pipegraph.planner.solver.prefix_sums import Allowed, Floats, Integers
from pipegraph.planner.solver.search.cut_space import Space
from pipegraph.planner.solver.search.incumbents import EQUAL

_LITTLE = 1e-9  # what evenness in operations counts beside that in weight


def evenest(costs: Sequence[SegmentCost], stages: int, most: float) -> tuple[int, ...]:
    """Of all cuts of which no stage weighs more than ``most``, the most even in weight; of these, in operations.

    There have to be such cuts. The most even have the least sum of squares.
    """
    weights = [cost.forward + cost.input_grad + cost.weight_grad for cost in costs]
    weight, limit = _before(weights), most / (sum(weights) or 1.0) * (1 + EQUAL)
    work = _before([float(cost.flops) for cost in costs])

    def light(stage: int, begins: Integers, ends: Integers) -> Allowed:
        allowed: Allowed = weight[ends][:, None] - weight[begins] <= limit
        return allowed

    def squares(stage: int, begins: Integers, ends: Integers) -> Floats:
        found: Floats = (weight[ends][:, None] - weight[begins]) ** 2
        return found + _LITTLE * (work[ends][:, None] - work[begins]) ** 2

    return tuple(Space.every(len(costs), stages).where(light).best(squares, np.add).tolist())


def _before(figures: Sequence[float]) -> Floats:
    """What comes before each edge, as a part of the whole."""
    sums: Floats = np.concatenate([[0.0], np.cumsum(figures)])
    return sums / (sums[-1] or 1.0)
