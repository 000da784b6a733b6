"""Loops of the model's source: which turn of a loop an item of a ``forward`` ran in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise

from pipegraph.codegen.forward.items import Item, Loop, Operation
from pipegraph.codegen.names.source_statements import Statement

Chain = tuple[Statement, ...]


def turns(chains: Mapping[Item, Chain]) -> dict[Item, int]:
    """Item → the turn, counted from 0, in which the statement that made it ran; 0 for one outside of loops.

    A statement runs anew when another of the same ``forward`` ran between, when it calls the same module again, or when
    it calls another of the same list: ``for layer in self.layers: x = x + layer(x)``.

    Args:
        chains: the items of a scope in order, each with the statements that led to it, outermost first.
    """
    found: dict[Item, int] = {}
    runs: dict[Statement, list[list[Item]]] = {}
    latest: dict[Chain, Statement] = {}
    for item, chain in chains.items():
        found[item] = 0
        if chain:
            again = latest.get(chain[:-1]) is not chain[-1]
            latest[chain[:-1]] = chain[-1]
            if chain[-1].in_loop:
                rows = runs.setdefault(chain[-1], [])
                rows.extend([[]] if again else [])
                rows[-1].append(item)
    for statement, rows in runs.items():
        for number, row in enumerate(turn for each in rows for turn in _turns_of(each, statement.calls)):
            found |= dict.fromkeys(row, number)
    return found


def _turns_of(row: Sequence[Item], called: AbstractSet[str]) -> list[Sequence[Item]]:
    """The turns in a row of items of one statement: each begins like the first, up to the module that it calls.

    Args:
        called: the attributes that the statement calls; another module was in a variable of the loop.
    """
    calls = [(position, place) for position, item in enumerate(row) if (place := _place(item)) is not None]
    if not calls:
        return [row]
    before, (container, first) = calls[0]
    seen = {first}
    starts = [0]
    for position, (other, name) in calls[1:]:
        next_of_loop = other == container and not {first, name} & called and name not in seen
        if next_of_loop or (other, name) == (container, first):
            seen.add(name)
            starts.append(position - before)
    return [row[start:stop] for start, stop in pairwise((*starts, len(row)))]


def _place(item: Item) -> tuple[str, str] | None:
    """The list and the number there of the module that an item calls."""
    if isinstance(item, Operation):
        return None
    fqn = item.calls[0].fqn if isinstance(item, Loop) else item.fqn
    container, _, name = fqn.rpartition(".")
    return container, name
