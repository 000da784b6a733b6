"""Which stages of a model wait for which, for cuts of its chain of segments."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from pipegraph.cost.segments.chain import Chain
from pipegraph.schedule.stages import Edge


def stage_edges(chain: Chain, cuts: Sequence[int]) -> tuple[Edge, ...]:
    """Return the (producer, consumer) pairs of stages between which a value with a gradient passes, ascending.

    Args:
        chain: of the model.
        cuts: the segments that start a stage, without the first one.
    """
    pairs = {(bisect_right(cuts, producer), bisect_right(cuts, consumer)) for producer, consumer in chain.edges}
    return tuple(sorted((producer, consumer) for producer, consumer in pairs if producer != consumer))
