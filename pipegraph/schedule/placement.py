"""Which rank holds which stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stages go round the ranks: stage s is on rank s mod ranks."""
    return tuple(range(ranks)) * chunks


def v(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stages go down the ranks and up again: rank r holds stages r and 2·ranks−1−r."""
    return (*range(ranks), *reversed(range(ranks)))


@dataclass(frozen=True)
class Placement:
    """``places`` makes stage → rank from (ranks, chunks). A rank has ``chunks`` stages, or any number from that on."""

    places: Callable[[int, int], tuple[int, ...]]
    chunks: int
    any_chunks: bool


PLACEMENTS: Mapping[str, Placement] = MappingProxyType({"loop": Placement(loop, 1, True), "v": Placement(v, 2, False)})
"""by name"""
