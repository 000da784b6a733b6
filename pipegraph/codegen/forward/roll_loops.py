"""Consecutive calls of modules of one class become loops, also if their arguments alternate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import fx

from pipegraph.codegen.forward.index_tests import periodic_test
from pipegraph.codegen.forward.items import AlternateCall, Item, ModuleCall, ModuleLoop
from pipegraph.codegen.forward.loop_statements import differ_in_one
from pipegraph.codegen.names.identifiers import is_number

# A loop whose iterations differ must have more of them than it has lines: one line more if a single argument
# alternates, three more if calls do.
_ITERATIONS, _ITERATIONS_OF_CALLS = 4, 6

# What a call takes at each position: the number of a result of the call before, or a value.
_Pattern = tuple[int | fx.Node, ...]


def roll_loops(items: Sequence[Item], outputs: Iterable[fx.Node]) -> tuple[Item, ...]:
    """Replace consecutive calls by loops, from the first item on, each as long as it can be.

    Args:
        outputs: what the ``forward`` of the items returns.
    """
    rolled: list[Item] = []
    position = 0
    while position < len(items):
        loop = _alternating(items, position, outputs) or _uniform(items, position, outputs)
        rolled.append(loop or items[position])
        position += len(loop.calls) if loop is not None else 1
    return tuple(rolled)


def _uniform(items: Sequence[Item], start: int, outputs: Iterable[fx.Node]) -> ModuleLoop | None:
    """The longest loop that begins at ``start`` and whose calls have the same arguments."""
    stop = _end_of_calls(items, start)
    while stop - start > 1 and not _is_private(items, start, stop, outputs):
        stop -= 1
    calls = tuple(item for item in items[start:stop] if isinstance(item, ModuleCall))
    return ModuleLoop(calls, _carried(calls[0], calls[1])) if len(calls) > 1 else None


def _alternating(items: Sequence[Item], start: int, outputs: Iterable[fx.Node]) -> ModuleLoop | None:
    """The longest loop that begins at ``start`` and whose calls have one of two sets of arguments, periodically."""
    calls: list[ModuleCall] = []
    for item in items[start:]:
        if not isinstance(item, ModuleCall) or (calls and not _follows(calls[-1], item)):
            break
        calls.append(item)
    patterns = [_pattern(*pair) for pair in pairwise(calls)]
    firsts = [pattern for pattern in dict.fromkeys(patterns) if _begins(calls[0], pattern)]
    if not firsts or set(patterns) == set(firsts[:1]):  # nothing alternates
        return None
    for count in range(len(calls), _ITERATIONS - 1, -1):
        for first in firsts:
            alternate = _alternate(calls[:count], [first, *patterns][:count])
            if alternate is not None and _is_private(items, start, start + count, outputs):
                return ModuleLoop(tuple(calls[:count]), _positions(first), alternate)
    return None


def _pattern(before: ModuleCall, after: ModuleCall) -> _Pattern:
    return tuple(before.makes.index(node) if node in before.makes else node for node in after.reads)


def _positions(pattern: _Pattern) -> tuple[tuple[int, int], ...]:
    """The positions that take a result of the call before, and which result."""
    return tuple((position, made) for position, made in enumerate(pattern) if isinstance(made, int))


def _begins(first: ModuleCall, pattern: _Pattern) -> bool:
    """Whether a first call takes what those with a pattern take, except for what they get from the call before."""
    carried = _positions(pattern)
    fixed = [(taken, node) for taken, node in zip(pattern, first.reads, strict=False) if not isinstance(taken, int)]
    same = len(pattern) == len(first.reads) and all(taken is node for taken, node in fixed)
    return same and bool(carried) and _starts_equal(first, carried)


def _alternate(calls: Sequence[ModuleCall], patterns: Sequence[_Pattern]) -> AlternateCall | None:
    """The arguments of the calls that are not like the first one, if they come periodically."""
    changes = sum(before != after for before, after in pairwise(patterns))
    numbers = [int(call.fqn.rpartition(".")[2]) for call in calls]
    found = periodic_test(numbers, patterns) if changes > 1 else None
    if found is None:
        return None
    test, chosen = found
    first, position = patterns[0], next(place for place, each in enumerate(patterns) if each != patterns[0])
    other = patterns[position]
    if {made for _, made in _positions(first)} != {made for _, made in _positions(other)}:
        return None
    if len(calls) < (_ITERATIONS if differ_in_one(first, other) else _ITERATIONS_OF_CALLS):
        return None
    return AlternateCall(test, chosen == first, calls[position].reads, _positions(other))


def _end_of_calls(items: Sequence[Item], start: int) -> int:
    """The position behind the last call that continues those from ``start`` on."""
    first = items[start]
    if not isinstance(first, ModuleCall):
        return start + 1
    stop, pattern = start + 1, None
    while stop < len(items):
        before, after = items[stop - 1], items[stop]
        if not isinstance(before, ModuleCall) or not isinstance(after, ModuleCall) or not _follows(before, after):
            break
        carried = _carried(before, after) if len(before.reads) == len(after.reads) else ()
        if not carried or (pattern is not None and carried != pattern) or not _starts_equal(first, carried):
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


def _carried(before: ModuleCall, after: ModuleCall) -> tuple[tuple[int, int], ...]:
    """The positions that take an output of the call before; nothing if any other position changes."""
    pattern = _pattern(before, after)
    fixed = [
        (earlier, later) for earlier, later in zip(before.reads, pattern, strict=True) if isinstance(later, fx.Node)
    ]
    return _positions(pattern) if all(earlier is later for earlier, later in fixed) else ()


def _starts_equal(first: ModuleCall, carried: Sequence[tuple[int, int]]) -> bool:
    """Whether positions that carry one value also begin with one value, so that one variable serves them."""
    begin: dict[int, fx.Node] = {}
    return all(begin.setdefault(made, first.reads[position]) is first.reads[position] for position, made in carried)


def _is_private(items: Sequence[Item], start: int, stop: int, outputs: Iterable[fx.Node]) -> bool:
    """Whether only the next call reads what a call of ``items[start:stop]`` makes, except for the last one."""
    inner = {node for item in items[start : stop - 1] for node in item.makes}
    outside = [node for item in (*items[:start], *items[stop:]) for node in item.reads]
    skipped = [
        node
        for before, after in zip(items[start:stop], items[start + 2 : stop], strict=False)
        for node in before.makes
        if node in after.reads
    ]
    return not skipped and inner.isdisjoint(outside) and inner.isdisjoint(outputs)
