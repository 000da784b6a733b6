"""Which stages of a model wait for which, for cuts of its chain of segments."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipegraph.cost.segments.chain import Chain
from pipegraph.schedule.stages import Edge


class StageEdges(NamedTuple):
    """(producer, consumer) pairs of stages, ascending.

    Attributes:
        values: between which values pass.
        gradients: those over which a gradient returns.
    """

    values: tuple[Edge, ...]
    gradients: tuple[Edge, ...]


def stage_edges(chain: Chain, cuts: Sequence[int]) -> StageEdges:
    """Return the edges between the stages of a model.

    Args:
        chain: of the model.
        cuts: the segments that start a stage, without the first one.
    """

    def of_stages(edges: Iterable[tuple[int, int]]) -> tuple[Edge, ...]:
        pairs = {(bisect_right(cuts, producer), bisect_right(cuts, consumer)) for producer, consumer in edges}
        return tuple(sorted((producer, consumer) for producer, consumer in pairs if producer != consumer))

    return StageEdges(of_stages(chain.edges), of_stages(chain.gradient_edges))
