"""Which stages of a schedule wait for which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

Edge = tuple[int, int]
"""(producer stage, consumer stage): values of the first are inputs of the second, a later one."""

Grouped = dict[int, tuple[int, ...]]


def chain(stages: int) -> tuple[Edge, ...]:
    """The edges of a plain pipeline: each stage feeds the next."""
    return tuple((stage, stage + 1) for stage in range(stages - 1))


@dataclass(frozen=True)
class Dependencies:
    """Which stages need each other's values and gradients.

    ``lowered`` says that the schedule has transfers: a value from another rank is then there once it is received,
    and otherwise as soon as the other rank has made it.
    """

    placement: tuple[int, ...]
    edges: tuple[Edge, ...]
    gradient_edges: tuple[Edge, ...]
    lowered: bool

    @cached_property
    def producers(self) -> Grouped:
        """Of each stage, the stages whose values it uses."""
        return _grouped((consumer, producer) for producer, consumer in self.edges)

    @cached_property
    def consumers(self) -> Grouped:
        """Of each stage, the stages that use its values."""
        return _grouped(self.edges)

    @cached_property
    def gradient_producers(self) -> Grouped:
        """Of each stage, the stages to which it gives back a gradient."""
        return _grouped((consumer, producer) for producer, consumer in self.gradient_edges)

    @cached_property
    def gradient_consumers(self) -> Grouped:
        """Of each stage, the stages that give a gradient back to it."""
        return _grouped(self.gradient_edges)

    def crosses(self, edge: Edge) -> bool:
        """Whether the edge's stages are on different ranks, so that its values must be transferred."""
        return self.placement[edge[0]] != self.placement[edge[1]]


def _grouped(pairs: Iterable[Edge]) -> Grouped:
    groups: dict[int, tuple[int, ...]] = {}
    for first, second in sorted(pairs):
        groups[first] = (*groups.get(first, ()), second)
    return groups
