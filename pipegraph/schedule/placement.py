"""Which rank holds which stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


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
