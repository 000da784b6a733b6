"""Numbers told apart as a person would: every second one, every sixth, the first three."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

# So many numbers are named one by one.
_NAMED = 3

Kind = TypeVar("Kind", bound=Hashable)


def told_apart(numbers: Sequence[int], kinds: Sequence[Kind]) -> tuple[str, Kind] | None:
    """A test for ascending numbers, as ``{} < 3``, ``{} % 6 == 5`` or ``{} in (2, 7)``, and the kind of those that
    pass; None where there are not just two kinds, or no such test tells them apart."""
    if len(set(kinds)) != 2:
        return None
    first, second = dict.fromkeys(kinds)
    meant = {kind: [number for number, each in zip(numbers, kinds, strict=True) if each == kind] for kind in kinds}
    rarer = min((first, second), key=lambda kind: len(meant[kind]))
    if len(meant[rarer]) == 1 and meant[rarer] != [numbers[0]]:
        return f"{{}} == {meant[rarer][0]}", rarer
    if meant[first][-1] < meant[second][0]:
        return f"{{}} < {meant[second][0]}", first
    repeated = period(numbers, kinds)
    if repeated is None and len(meant[rarer]) <= _NAMED:
        return f"{{}} in {tuple(meant[rarer])}", rarer
    return repeated


def period(numbers: Sequence[int], kinds: Sequence[Kind]) -> tuple[str, Kind] | None:
    """The same, for one kind that comes back at a fixed distance; the numbers span that distance twice at least."""
    for kind in dict.fromkeys(kinds) if len(set(kinds)) == 2 else ():
        meant = [number for number, each in zip(numbers, kinds, strict=True) if each == kind]
        length = meant[1] - meant[0] if len(meant) > 1 else 1
        rest = meant[0] % length
        even = (length, rest) == (2, 0)  # of two that take turns, the odd ones are meant
        if 2 <= length <= len(numbers) / 2 and not even and meant == [n for n in numbers if n % length == rest]:
            return ("{} % 2" if length == 2 else f"{{}} % {length} == {rest}"), kind
    return None
