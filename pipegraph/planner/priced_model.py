"""A priced model as the planner sees it: segments to balance, and exact stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pipegraph.cost import SegmentCost
from pipegraph.cost.price import PricedModel


class Costs:
    """What segments and stages cost. A weight that stands for F, I and W alike counts once, as F."""

    def __init__(self, priced: PricedModel) -> None:
        self.priced = priced
        self.segments = tuple(self._once(cost) for cost in priced.costs)
        self._stages: dict[tuple[int, int], SegmentCost] = {}

    def stages(self, cuts: Sequence[int]) -> tuple[SegmentCost, ...]:
        """The stages that cuts make. These are exact, where a sum over segments leaves out what a cut takes, counts
        twice what two segments keep, and counts a tied weight in one stage only."""
        return tuple(self._stage(start, stop) for start, stop in pairwise([0, *cuts, len(self.segments)]))

    def _stage(self, start: int, stop: int) -> SegmentCost:
        if (start, stop) not in self._stages:
            self._stages[start, stop] = self._once(self.priced.stage(start, stop))
        return self._stages[start, stop]

    def _once(self, cost: SegmentCost) -> SegmentCost:
        return cost if self.priced.unit in ("s", "FLOP") else replace(cost, input_grad=0.0, weight_grad=0.0)
