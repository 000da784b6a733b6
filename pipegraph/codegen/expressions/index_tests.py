"""Tests of a loop's index as a person would write them: ``i < 3``, ``i in (2, 7)``, ``i % 6 == 5``."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipegraph.codegen.syntax.expressions import Binary, Expression, literal

# The most indices that a test lists.
_LISTED = 3

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

    None if there are not exactly two kinds, or if no test separates them.

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
    if periodic is None and len(of_kind[rarer]) <= _LISTED:
        return IndexTest("in", tuple(of_kind[rarer])), rarer
    return periodic


def periodic_test(indices: Sequence[int], kinds: Sequence[Kind]) -> tuple[IndexTest, Kind] | None:
    """A test with a modulus, and the kind for which it holds; None if no kind returns after a fixed period.

    The indices must cover the period at least twice.
    """
    for kind in dict.fromkeys(kinds) if len(set(kinds)) == 2 else ():
        chosen = [index for index, each in zip(indices, kinds, strict=True) if each == kind]
        period = chosen[1] - chosen[0] if len(chosen) > 1 else 1
        rest = chosen[0] % period
        is_even = (period, rest) == (2, 0)  # if two kinds alternate, the test is for the odd indices
        if 2 <= period <= len(indices) / 2 and not is_even and chosen == [i for i in indices if i % period == rest]:
            return IndexTest(modulus=period) if period == 2 else IndexTest("==", rest, period), kind
    return None
