"""Which stages of a schedule wait for which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

Edge = tuple[int, int]
"""(producer stage, consumer stage): the second, a later stage, uses values of the first."""

StagesByStage = dict[int, tuple[int, ...]]


def chain(stages: int) -> tuple[Edge, ...]:
    """Return the edges of a plain pipeline: each stage feeds the next."""
    return tuple((stage, stage + 1) for stage in range(stages - 1))


@dataclass(frozen=True)
class Dependencies:
    """The edges of a schedule: which stages need values and gradients of which others.

    If ``lowered``, the schedule has transfers, and a value from another rank can be used when it has been received;
    otherwise, as soon as the other rank has made it.
    """

    placement: tuple[int, ...]
    edges: tuple[Edge, ...]
    gradient_edges: tuple[Edge, ...]
    lowered: bool

    @cached_property
    def producers(self) -> StagesByStage:
        """stage → the stages whose values it uses"""
        return _grouped((consumer, producer) for producer, consumer in self.edges)

    @cached_property
    def consumers(self) -> StagesByStage:
        """stage → the stages that use its values"""
        return _grouped(self.edges)

    @cached_property
    def gradient_producers(self) -> StagesByStage:
        """stage → the stages to which it returns a gradient"""
        return _grouped((consumer, producer) for producer, consumer in self.gradient_edges)

    @cached_property
    def gradient_consumers(self) -> StagesByStage:
        """stage → the stages that return a gradient to it"""
        return _grouped(self.gradient_edges)

    def crosses(self, edge: Edge) -> bool:
        """Return whether the edge's stages are on different ranks, so that its values are transferred."""
        return self.placement[edge[0]] != self.placement[edge[1]]


def _grouped(pairs: Iterable[Edge]) -> StagesByStage:
    groups: dict[int, tuple[int, ...]] = {}
    for first, second in sorted(pairs):
        groups[first] = (*groups.get(first, ()), second)
    return groups
