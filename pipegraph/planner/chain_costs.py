"""The costs of segments and of stages, as plans add them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pipegraph.cost import SegmentCost
from pipegraph.cost.price import PricedModel


class ChainCosts:
    """What the segments and stages of a priced model cost.

    A figure that is no time, such as a number of parameters, is the same for F, I and W. It counts once, as F.
    """

    def __init__(self, priced: PricedModel) -> None:
        self.priced = priced
        self.segments = tuple(self._counted_once(cost) for cost in priced.costs)
        self._stages: dict[tuple[int, int], SegmentCost] = {}

    def stages(self, cuts: Sequence[int]) -> tuple[SegmentCost, ...]:
        """Return the exact costs of the stages that cuts make.

        A sum over segments is not exact: it leaves out what a cut takes, counts twice what two segments keep, and
        counts a tied weight in one stage only.
        """
        return tuple(self._stage(start, stop) for start, stop in pairwise([0, *cuts, len(self.segments)]))

    def _stage(self, start: int, stop: int) -> SegmentCost:
        if (start, stop) not in self._stages:
            self._stages[start, stop] = self._counted_once(self.priced.stage(start, stop))
        return self._stages[start, stop]

    def _counted_once(self, cost: SegmentCost) -> SegmentCost:
        return cost if self.priced.unit in ("s", "FLOP") else replace(cost, input_grad=0.0, weight_grad=0.0)
