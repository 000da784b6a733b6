"""The statements of an ``__init__``: what each sets, and the order of those of two classes that become one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipegraph.codegen.classes.merge_bodies import Statements
from pipegraph.codegen.syntax.expressions import FunctionCall
from pipegraph.codegen.syntax.statements import Assign, Evaluate, If, Statement

Key = tuple[object, int]
"""What a statement sets, and how many before it set the same: several ``if`` may have one test."""


def _target(statement: Statement) -> object:
    """What a statement of ``__init__`` sets."""
    if isinstance(statement, Assign):
        return statement.targets
    if isinstance(statement, Evaluate) and isinstance(statement.value, FunctionCall):
        return statement.value.function, statement.value.arguments[:1]
    return statement.test.text if isinstance(statement, If) else statement


def by_target(statements: Statements) -> dict[Key, Statement]:
    """What each statement sets → the statement. Of several ``if`` with one test each has a number of its own."""
    found: dict[Key, Statement] = {}
    for each in statements:
        target = _target(each)
        found[target, sum(target == other for other, _ in found)] = each
    return found


def joined(statements: Iterable[Statement]) -> Statements:
    """Statements with neighbouring ``if`` of one test as one."""
    made: list[Statement] = []
    for each in statements:
        before = made[-1] if made else None
        if isinstance(each, If) and isinstance(before, If) and each.test == before.test:
            made[-1] = If(each.test, (*before.body, *each.body), (*before.other, *each.other))
        else:
            made.append(each)
    return tuple(made)


def places(statements: Statements) -> dict[str, Key]:
    """The attributes that statements set, also inside ``if`` → the key of the outermost statement in `by_target`."""
    return {
        target.text: key
        for key, each in by_target(statements).items()
        for node in each.walk()
        if isinstance(node, Assign)
        for target in node.targets
    }


def merged_order(first: Sequence[Key], second: Sequence[Key]) -> list[Key]:
    """Both sequences without repetition; what only the second has comes after what it follows there."""
    order = list(first)
    for place, each in enumerate(second):
        if each not in order:
            order.insert(order.index(second[place - 1]) + 1 if place else 0, each)
    return order
