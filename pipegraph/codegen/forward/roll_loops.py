"""Rows of calls of like modules become loops; where their arguments alternate, loops that tell the turns apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import fx

from pipegraph.codegen.forward.index_tests import period
from pipegraph.codegen.forward.items import Alternate, Item, Loop, ModuleCall
from pipegraph.codegen.forward.loop_statements import differ_in_one
from pipegraph.codegen.names.identifiers import is_number

# A loop that tells its turns apart must have more turns than it has lines: one line more where a single argument
# alternates, three more where calls do.
_TURNS, _TURNS_OF_CALLS = 4, 6

# What a call takes at each position: the number of a result of the call before, or a value.
_Pattern = tuple[int | fx.Node, ...]


def roll(items: Sequence[Item], outputs: Iterable[fx.Node]) -> tuple[Item, ...]:
    """Turn rows of like calls into loops, the longest first in order."""
    rolled: list[Item] = []
    position = 0
    while position < len(items):
        loop = _alternating(items, position, outputs) or _uniform(items, position, outputs)
        rolled.append(loop or items[position])
        position += len(loop.calls) if loop is not None else 1
    return tuple(rolled)


def _uniform(items: Sequence[Item], start: int, outputs: Iterable[fx.Node]) -> Loop | None:
    """The longest loop that begins at ``start`` and whose calls all take the same."""
    stop = _end_of_row(items, start)
    while stop - start > 1 and not _private(items, start, stop, outputs):
        stop -= 1
    calls = tuple(item for item in items[start:stop] if isinstance(item, ModuleCall))
    return Loop(calls, _carried(calls[0], calls[1])) if len(calls) > 1 else None


def _alternating(items: Sequence[Item], start: int, outputs: Iterable[fx.Node]) -> Loop | None:
    """The longest loop that begins at ``start`` and whose calls take one of two things, in a fixed rhythm."""
    calls: list[ModuleCall] = []
    for item in items[start:]:
        if not isinstance(item, ModuleCall) or (calls and not _follows(calls[-1], item)):
            break
        calls.append(item)
    patterns = [_pattern(*pair) for pair in pairwise(calls)]
    firsts = [pattern for pattern in dict.fromkeys(patterns) if _begins(calls[0], pattern)]
    if not firsts or set(patterns) == set(firsts[:1]):  # nothing alternates
        return None
    for count in range(len(calls), _TURNS - 1, -1):
        for first in firsts:
            alternate = _alternate(calls[:count], [first, *patterns][:count])
            if alternate is not None and _private(items, start, start + count, outputs):
                return Loop(tuple(calls[:count]), _positions(first), alternate)
    return None


def _pattern(before: ModuleCall, after: ModuleCall) -> _Pattern:
    return tuple(before.makes.index(node) if node in before.makes else node for node in after.reads)


def _positions(pattern: _Pattern) -> tuple[tuple[int, int], ...]:
    """The positions that take a result of the call before, and which result."""
    return tuple((position, made) for position, made in enumerate(pattern) if isinstance(made, int))


def _begins(first: ModuleCall, pattern: _Pattern) -> bool:
    """Whether a first call takes what those with a pattern take, but for what they get from the call before."""
    carried = _positions(pattern)
    fixed = [(taken, node) for taken, node in zip(pattern, first.reads, strict=False) if not isinstance(taken, int)]
    same = len(pattern) == len(first.reads) and all(taken is node for taken, node in fixed)
    return same and bool(carried) and _starts_alike(first, carried)


def _alternate(calls: Sequence[ModuleCall], patterns: Sequence[_Pattern]) -> Alternate | None:
    """What the calls take that are not like the first, if they come in a fixed rhythm."""
    changes = sum(before != after for before, after in pairwise(patterns))
    found = period([int(call.fqn.rpartition(".")[2]) for call in calls], patterns) if changes > 1 else None
    if found is None:
        return None
    test, meant = found
    first, position = patterns[0], next(place for place, each in enumerate(patterns) if each != patterns[0])
    other = patterns[position]
    if {made for _, made in _positions(first)} != {made for _, made in _positions(other)}:
        return None
    if len(calls) < (_TURNS if differ_in_one(first, other) else _TURNS_OF_CALLS):
        return None
    return Alternate(test, meant == first, calls[position].reads, _positions(other))


def _end_of_row(items: Sequence[Item], start: int) -> int:
    """Behind the last call that continues the row which begins at ``start``."""
    first = items[start]
    if not isinstance(first, ModuleCall):
        return start + 1
    stop, pattern = start + 1, None
    while stop < len(items):
        before, after = items[stop - 1], items[stop]
        if not isinstance(before, ModuleCall) or not isinstance(after, ModuleCall) or not _continues(before, after):
            break
        carried = _carried(before, after)
        if not carried or (pattern is not None and carried != pattern) or not _starts_alike(first, carried):
            break
        pattern, stop = carried, stop + 1
    return stop


def _follows(before: ModuleCall, after: ModuleCall) -> bool:
    """Whether two calls run modules of one class that follow each other in one container."""
    (container, _, name), (other, _, next_name) = before.fqn.rpartition("."), after.fqn.rpartition(".")
    if before.arguments is not None or after.arguments is not None:
        return False
    counted = is_number(name) and is_number(next_name) and int(next_name) == int(name) + 1
    same = before.model_class == after.model_class and len(before.makes) == len(after.makes)
    return counted and container == other and same


def _continues(before: ModuleCall, after: ModuleCall) -> bool:
    """Whether they also take as many values."""
    return _follows(before, after) and len(before.reads) == len(after.reads)


def _carried(before: ModuleCall, after: ModuleCall) -> tuple[tuple[int, int], ...]:
    """The positions that take an output of the call before; nothing if any other position changes."""
    carried = []
    for position, (earlier, later) in enumerate(zip(before.reads, after.reads, strict=True)):
        if later in before.makes:
            carried.append((position, before.makes.index(later)))
        elif earlier is not later:
            return ()
    return tuple(carried)


def _starts_alike(first: ModuleCall, carried: Sequence[tuple[int, int]]) -> bool:
    """Whether positions that carry one value also begin with one value, so that one variable serves them."""
    begin: dict[int, fx.Node] = {}
    return all(begin.setdefault(made, first.reads[position]) is first.reads[position] for position, made in carried)


def _private(items: Sequence[Item], start: int, stop: int, outputs: Iterable[fx.Node]) -> bool:
    """Whether nothing outside reads what the row hands on inside."""
    inner = {node for item in items[start : stop - 1] for node in item.makes}
    outside = [node for item in (*items[:start], *items[stop:]) for node in item.reads]
    skipped = [
        node
        for before, after in zip(items[start:stop], items[start + 2 : stop], strict=False)
        for node in before.makes
        if node in after.reads
    ]
    return not skipped and inner.isdisjoint(outside) and inner.isdisjoint(outputs)
