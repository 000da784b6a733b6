"""Expressions of a loop's index: numbers that grow with each iteration, and tests, ``i < 3``, ``i % 6 == 5``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from pipegraph.codegen.syntax.expressions import (
    Binary,
    Expression,
    FunctionCall,
    Literal,
    Name,
    Node,
    Slice,
    call,
    literal,
    string,
)

_NUMBER, _TEXT = re.compile(r"(-?\d+)"), re.compile(r'"(\d+)"')
_STR = Name("str")

Part = TypeVar("Part", bound=Node)

# The most indices that a test lists.
_LISTED = 3

Kind = TypeVar("Kind", bound=Hashable)


class StructureMismatch(Exception):
    """Two iterations of a loop differ in more than numbers that grow."""


@dataclass(frozen=True)
class Progression(Expression):
    """``first + difference * n`` in the iteration ``n``, counted from 0."""

    first: int
    difference: int

    @property
    def text(self) -> str:
        return "i" if abs(self.difference) == 1 else f"i * {abs(self.difference)}"  # about as long as it becomes

    @property
    def strength(self) -> int:
        return self.by_variable(Name("i"), 0, 1).strength

    def at(self, iteration: int) -> int:
        """The number in an iteration."""
        return self.first + self.difference * iteration

    def by_variable(self, variable: Name, start: int, step: int) -> Expression:
        """The number by the variable of a loop, which begins with ``start`` and grows by ``step``, 1 or -1."""
        factor = self.difference * step
        offset = self.first - factor * start
        if factor == -1:
            return Binary("-", literal(offset), variable)
        shift = offset // factor
        if offset == shift * factor:
            shifted = _plus(variable, shift)
            return shifted if factor == 1 else Binary("*", shifted, literal(factor))
        return _plus(Binary("*", variable, literal(factor)), offset)


def _plus(value: Expression, number: int) -> Expression:
    if number == 0:
        return value
    return Binary("+" if number > 0 else "-", value, literal(abs(number)))


def in_all_iterations(second: Part, third: Part) -> Part:
    """What the second and the third iteration of a loop say, with progressions for the numbers in which they differ.

    Raises:
        StructureMismatch: they differ in something else.
    """
    part: Any = second
    if second != third:
        if isinstance(second, Literal) and isinstance(third, Literal):
            part = _between(second, third)
        elif isinstance(second, Slice) and isinstance(third, Slice):
            part = _slice(second, third)
        else:
            part = _rebuilt(second, third)
    result: Part = part
    return result


def _between(second: Literal, third: Literal) -> Expression:
    """``i``, or ``str(i)`` for ``"0"``, ``"1"``, …."""
    pattern = _NUMBER if second.is_number else _TEXT
    second_match, third_match = pattern.fullmatch(second.text), pattern.fullmatch(third.text)
    if second.is_number != third.is_number or second_match is None or third_match is None:
        raise StructureMismatch
    difference = int(third_match[1]) - int(second_match[1])
    progression = Progression(int(second_match[1]) - difference, difference)
    return progression if second.is_number else call(_STR, progression)


def _slice(second: Slice, third: Slice) -> Slice:
    """The first of several slices of one length has no start, and the last one has no stop."""
    start, step = _slice_part(second.start, third.start, literal(0)), _slice_part(second.step, third.step)
    if isinstance(start, Progression) and second.stop is not None and third.stop is None:
        return Slice(start, Progression(int(second.stop.text) - start.difference, start.difference), step)
    return Slice(start, _slice_part(second.stop, third.stop), step)


def _slice_part(
    second: Expression | None, third: Expression | None, default: Expression | None = None
) -> Expression | None:
    if second is third is None:
        return None
    second, third = second or default, third or default
    if second is None or third is None:
        raise StructureMismatch
    return in_all_iterations(second, third)


def _rebuilt(second: Node, third: Node) -> Node:
    if type(second) is not type(third):
        raise StructureMismatch
    changed: dict[str, Any] = {}
    for entry in fields(second):  # type: ignore[arg-type]
        second_part, third_part = getattr(second, entry.name), getattr(third, entry.name)
        if isinstance(second_part, tuple) and isinstance(third_part, tuple) and len(second_part) == len(third_part):
            changed[entry.name] = tuple(map(_part, second_part, third_part))
        else:
            changed[entry.name] = _part(second_part, third_part) if entry.compare else second_part
    return type(second)(**changed)


def _part(second: Any, third: Any) -> Any:
    if isinstance(second, Node) and isinstance(third, Node):
        return in_all_iterations(second, third)
    if second != third:
        raise StructureMismatch
    return second


def progressions(nodes: Iterable[Node]) -> Iterator[Progression]:
    """The progressions in source, in its order."""
    return (part for node in nodes for part in node.walk() if isinstance(part, Progression))


def with_variable(node: Part, variable: Name, start: int, step: int) -> Part:
    """Source with the variable of a loop in its progressions."""

    def change(part: Any) -> Any:
        return part.by_variable(variable, start, step) if isinstance(part, Progression) else part.rebuilt(change)

    changed: Part = change(node)
    return changed


def at_iteration(node: Part, iteration: int) -> Part:
    """Source as it is in one iteration of a loop."""

    def change(part: Any) -> Any:
        if (
            isinstance(part, FunctionCall)
            and part.function == _STR
            and isinstance(part.arguments[0].value, Progression)
        ):
            return string(str(part.arguments[0].value.at(iteration)))
        return literal(part.at(iteration)) if isinstance(part, Progression) else part.rebuilt(change)

    changed: Part = change(node)
    return changed


@dataclass(frozen=True)
class IndexTest:
    """``i < 3``, ``i in (2, 7)`` or, with a ``modulus``, ``i % 6 == 5`` and ``i % 2``."""

    symbol: str = ""
    operand: int | tuple[int, ...] = 0
    modulus: int = 0

    def expression(self, index: Expression) -> Expression:
        """The test of an index."""
        tested = Binary("%", index, literal(self.modulus)) if self.modulus else index
        return Binary(self.symbol, tested, literal(self.operand)) if self.symbol else tested


def separating_test(indices: Sequence[int], kinds: Sequence[Kind]) -> tuple[IndexTest, Kind] | None:
    """A test that holds for the indices of one kind only, and that kind.

    None if the number of kinds is not two, or if no test separates them.

    Args:
        indices: in ascending order.
        kinds: the kind of each.
    """
    if len(set(kinds)) != 2:
        return None
    first, second = dict.fromkeys(kinds)
    of_kind = {kind: [index for index, label in zip(indices, kinds, strict=True) if label == kind] for kind in kinds}
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
        chosen = [index for index, label in zip(indices, kinds, strict=True) if label == kind]
        period = chosen[1] - chosen[0] if len(chosen) > 1 else 1
        phase = chosen[0] % period
        is_even = (period, phase) == (2, 0)  # if two kinds alternate, the test is for the odd indices
        if 2 <= period <= len(indices) / 2 and not is_even and chosen == [i for i in indices if i % period == phase]:
            return IndexTest(modulus=period) if period == 2 else IndexTest("==", phase, period), kind
    return None
