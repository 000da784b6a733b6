"""Tests of a loop's index as a person would write them: every second one, every sixth, the first three."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipegraph.codegen.syntax.expressions import Binary, Expression, literal

# So many indices are named one by one.
_NAMED = 3

Kind = TypeVar("Kind", bound=Hashable)


@dataclass(frozen=True)
class IndexTest:
    """``i < 3``, ``i in (2, 7)`` or, with a ``modulus``, ``i % 6 == 5`` and ``i % 2``."""

    symbol: str = ""
    operand: int | tuple[int, ...] = 0
    modulus: int = 0

    def of(self, index: Expression) -> Expression:
        """The test of an index."""
        tested = Binary("%", index, literal(self.modulus)) if self.modulus else index
        return Binary(self.symbol, tested, literal(self.operand)) if self.symbol else tested


def separating_test(indices: Sequence[int], kinds: Sequence[Kind]) -> tuple[IndexTest, Kind] | None:
    """A test that holds for the indices of one kind only, and that kind.

    None if there are not just two kinds, or if no such test tells them apart.

    Args:
        indices: in ascending order.
        kinds: the kind of each.
    """
    if len(set(kinds)) != 2:
        return None
    first, second = dict.fromkeys(kinds)
    of_kind = {kind: [index for index, each in zip(indices, kinds, strict=True) if each == kind] for kind in kinds}
    rarer = min((first, second), key=lambda kind: len(of_kind[kind]))
    if len(of_kind[rarer]) == 1 and of_kind[rarer] != [indices[0]]:
        return IndexTest("==", of_kind[rarer][0]), rarer
    if of_kind[first][-1] < of_kind[second][0]:
        return IndexTest("<", of_kind[second][0]), first
    periodic = periodic_test(indices, kinds)
    if periodic is None and len(of_kind[rarer]) <= _NAMED:
        return IndexTest("in", tuple(of_kind[rarer])), rarer
    return periodic


def periodic_test(indices: Sequence[int], kinds: Sequence[Kind]) -> tuple[IndexTest, Kind] | None:
    """The same, if one kind comes back at a fixed distance and the indices span that distance twice at least."""
    for kind in dict.fromkeys(kinds) if len(set(kinds)) == 2 else ():
        chosen = [index for index, each in zip(indices, kinds, strict=True) if each == kind]
        period = chosen[1] - chosen[0] if len(chosen) > 1 else 1
        rest = chosen[0] % period
        even = (period, rest) == (2, 0)  # of two that alternate, the test is for the odd ones
        if 2 <= period <= len(indices) / 2 and not even and chosen == [i for i in indices if i % period == rest]:
            return IndexTest(modulus=period) if period == 2 else IndexTest("==", rest, period), kind
    return None
