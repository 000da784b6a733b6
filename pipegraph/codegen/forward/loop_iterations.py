"""Loops of the model's source: the iteration of a loop that an item of a ``forward`` ran in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise

from pipegraph.codegen.forward.items import Item, fqn_of
from pipegraph.codegen.names.source_statements import SourceStatement

StatementChain = tuple[SourceStatement, ...]


def loop_iterations(chains: Mapping[Item, StatementChain]) -> dict[Item, int]:
    """Item → the iteration, counted from 0, in which the statement that made it ran; 0 for one outside of loops.

    A statement is taken to run again if another statement of the same ``forward`` ran in between, if it calls the same
    module again, or if it calls another of the same list: ``for layer in self.layers: x = x + layer(x)``.

    Args:
        chains: the items in order, each with the statements that led to it, outermost first.
    """
    found: dict[Item, int] = {}
    runs: dict[SourceStatement, list[list[Item]]] = {}  # the items of each statement, in uninterrupted groups
    latest: dict[StatementChain, SourceStatement] = {}
    for item, chain in chains.items():
        found[item] = 0
        if chain:
            again = latest.get(chain[:-1]) is not chain[-1]
            latest[chain[:-1]] = chain[-1]
            if chain[-1].in_loop:
                groups = runs.setdefault(chain[-1], [])
                groups.extend([[]] if again else [])
                groups[-1].append(item)
    for statement, groups in runs.items():
        iterations = [iteration for group in groups for iteration in _split(group, statement.calls)]
        for number, iteration in enumerate(iterations):
            found |= dict.fromkeys(iteration, number)
    return found


def _split(group: Sequence[Item], called: AbstractSet[str]) -> list[Sequence[Item]]:
    """The iterations in a group of items of one statement: each begins like the first, up to the module that it calls.

    Args:
        called: the attributes that the statement calls; any other module was in a variable of the loop.
    """
    calls = [
        (position, fqn.rpartition(".")) for position, item in enumerate(group) if (fqn := fqn_of(item)) is not None
    ]
    if not calls:
        return [group]
    before, (container, _, first) = calls[0]
    seen = {first}
    starts = [0]
    for position, (other, _, name) in calls[1:]:
        next_of_list = other == container and not {first, name} & called and name not in seen
        if next_of_list or (other, name) == (container, first):
            seen.add(name)
            starts.append(position - before)
    return [group[start:stop] for start, stop in pairwise((*starts, len(group)))]
