"""Terms: expressions of operators, each stored once, so that equal expressions have equal numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Operand(NamedTuple):
    """A term among the arguments of another one. Plain numbers among them are arguments of the operator."""

    term: int


class Key(NamedTuple):
    """An operator with its arguments.

    Attributes:
        operator: its name.
        arguments: `Operand`, numbers, texts, and tuples of them.
        shape: of the value; ``()`` for a tuple of values.
        dtype: of the value, as text; "" for a tuple of values.
    """

    operator: str
    arguments: tuple[object, ...]
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class Terms:
    """A table of terms. The number of a term is its position in ``keys``."""

    keys: list[Key] = field(default_factory=list)
    numbers: dict[Key, int] = field(default_factory=dict)

    def number(self, key: Key) -> int:
        """Return the number of a term; a new one if the table does not have it."""
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.keys)
            self.keys.append(key)
        return number

    def reachable(self, numbers: Iterable[int]) -> set[int]:
        """Return terms and all that they read."""
        waiting, reached = list(numbers), set[int]()
        while waiting:
            number = waiting.pop()
            if number not in reached:
                reached.add(number)
                waiting += operands(self.keys[number].arguments)
        return reached


def operands(value: object) -> Iterator[int]:
    """Yield the terms in an argument."""
    if isinstance(value, Operand):
        yield value.term
    elif type(value) is tuple:
        for part in value:
            yield from operands(part)


def replace_terms(value: Any, terms: dict[int, int]) -> Any:
    """Return an argument with other terms in place of those that it has.

    Raises:
        KeyError: it has a term for which there is no other one.
    """
    if isinstance(value, Operand):
        return Operand(terms[value.term])
    if type(value) is tuple:
        return tuple(replace_terms(part, terms) for part in value)
    return value
