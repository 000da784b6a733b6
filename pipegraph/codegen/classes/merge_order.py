"""The order in which the classes of one name are merged, so that a condition tells each two apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from statistics import fmean

from pipegraph.codegen.syntax.statements import ClassSource

Distance = Callable[[ClassSource, ClassSource], float]
_Split = tuple[tuple[ClassSource, ...], tuple[ClassSource, ...]]


def merge_order(members: Sequence[ClassSource], distance: Distance) -> list[tuple[str, str]]:
    """Return the names of the classes to merge, one pair after the other.

    A parameter of ``forward`` or an attribute of the model splits the classes in two groups, and so on for each group.
    Merged from the smallest groups upwards, the two sides of each merge differ in that parameter or attribute. The
    split is the one whose groups are most alike inside and least alike between them.

    Args:
        members: classes that the model has under one name.
        distance: how much two of them differ.

    Returns:
        (first, second) for each merge, whose result has the name of the first.
    """
    if len(members) < 2:
        return []
    splits = list(_splits(members)) or [_alone(members, each) for each in members]
    first, second = max(splits, key=lambda split: _contrast(split, distance))
    return [*merge_order(first, distance), *merge_order(second, distance), (first[0].name, second[0].name)]


def _splits(members: Sequence[ClassSource]) -> Iterator[_Split]:
    """The ways to split classes in two groups by a parameter, or by an attribute with two values."""
    parameters = dict.fromkeys(name for each in members for name in each.parameters)
    for name in parameters:
        yield from _split(members, [name in each.parameters for each in members])
    for name in members[0].attributes:
        yield from _split(members, [each.attributes.get(name) for each in members])


def _split(members: Sequence[ClassSource], values: Sequence[object]) -> Iterator[_Split]:
    if None not in values and len(set(values)) == 2:
        same = [value == values[0] for value in values]
        first, second = (
            tuple(each for each, is_same in zip(members, same, strict=True) if is_same == wanted)
            for wanted in (True, False)
        )
        yield first, second


def _contrast(split: _Split, distance: Distance) -> float:
    between = fmean(distance(one, two) for one in split[0] for two in split[1])
    inside = [distance(one, two) for group in split for one, two in combinations(group, 2)]
    return between - fmean(inside or [0])


def _alone(members: Sequence[ClassSource], member: ClassSource) -> _Split:
    """One class, and the others; the first of all is in the first group, which the merged class is named after."""
    others = tuple(each for each in members if each is not member)
    return ((member,), others) if member is members[0] else (others, (member,))
