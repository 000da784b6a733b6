"""Where the stages of a schedule are, and which of them wait for which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

Edge = tuple[int, int]
"""(producer stage, consumer stage): the second, a later stage, uses values of the first."""

StagesByStage = dict[int, tuple[int, ...]]


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """Place stages round the ranks: stage s on rank s mod ranks."""
    return tuple(range(ranks)) * chunks


def v(ranks: int, chunks: int) -> tuple[int, ...]:
    """Place stages down the ranks and up again: rank r holds stages r and 2·ranks−1−r."""
    return (*range(ranks), *reversed(range(ranks)))


@dataclass(frozen=True)
class Placement:
    """A way to place stages on ranks."""

    places: Callable[[int, int], tuple[int, ...]]
    """(ranks, chunks) → the rank of each stage"""
    chunks: int
    """stages on a rank"""
    any_chunks: bool
    """whether a rank may hold more than ``chunks``"""


PLACEMENTS: Mapping[str, Placement] = MappingProxyType({"loop": Placement(loop, 1, True), "v": Placement(v, 2, False)})
"""by name"""


def placement_name(placement: Sequence[int]) -> str | None:
    """Return the name of a placement; None if `PLACEMENTS` does not have it."""
    ranks = max(placement) + 1
    chunks, remainder = divmod(len(placement), ranks)
    for name, kind in PLACEMENTS.items():
        is_possible = chunks == kind.chunks or (chunks > kind.chunks and kind.any_chunks)
        if not remainder and is_possible and kind.places(ranks, chunks) == tuple(placement):
            return name
    return None


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
