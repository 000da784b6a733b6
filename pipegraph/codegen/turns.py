"""Loops of the model's source: which turn of a loop an item of a ``forward`` ran in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipegraph.codegen.items import Item, Loop, Operation
from pipegraph.codegen.origins import Statement

Chain = tuple[Statement, ...]


def turns(chains: Mapping[Item, Chain]) -> dict[Item, int]:
    """Item → the turn, counted from 0, in which the statement that made it ran; 0 for one outside of loops.

    A statement runs anew when another of the same ``forward`` ran between, or when it calls another module of the same
    list: ``for layer in self.layers: x = x + layer(x)``.

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
    for rows in runs.values():
        for number, row in enumerate(turn for each in rows for turn in _turns_of(each)):
            found |= dict.fromkeys(row, number)
    return found


def _turns_of(row: Sequence[Item]) -> list[Sequence[Item]]:
    """The turns in a row of items of one statement: each calls a module of the list that the first call is from."""
    calls = [(position, _place(item)) for position, item in enumerate(row)]
    listed = [(position, place) for position, place in calls if place is not None]
    if not listed:
        return [row]
    before, (container, _) = listed[0]
    seen: set[str] = set()
    starts: list[int] = []
    for position, (other, number) in listed:
        if other == container and number not in seen:
            seen.add(number)
            starts.append(max(position - before, 0))
    return [row[start:stop] for start, stop in zip(starts, [*starts[1:], len(row)], strict=True)]


def _place(item: Item) -> tuple[str, str] | None:
    """The list and the number there of the module that an item calls."""
    if isinstance(item, Operation):
        return None
    fqn = item.calls[0].fqn if isinstance(item, Loop) else item.fqn
    container, _, name = fqn.rpartition(".")
    return container, name
