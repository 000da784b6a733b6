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
    by_key: dict[Key, Statement] = {}
    for statement in statements:
        target = _target(statement)
        by_key[target, sum(target == other_target for other_target, _ in by_key)] = statement
    return by_key


def joined(statements: Iterable[Statement]) -> Statements:
    """Statements with neighbouring ``if`` of one test as one."""
    body: list[Statement] = []
    for statement in statements:
        previous = body[-1] if body else None
        if isinstance(statement, If) and isinstance(previous, If) and statement.test == previous.test:
            body[-1] = If(statement.test, (*previous.body, *statement.body), (*previous.orelse, *statement.orelse))
        else:
            body.append(statement)
    return tuple(body)


def places(statements: Statements) -> dict[str, Key]:
    """The attributes that statements set, also inside ``if`` → the key of the outermost statement in `by_target`."""
    return {
        target.text: key
        for key, statement in by_target(statements).items()
        for node in statement.walk()
        if isinstance(node, Assign)
        for target in node.targets
    }


def merged_order(first: Sequence[Key], second: Sequence[Key]) -> list[Key]:
    """Both sequences without repetition; what only the second has comes after what it follows there."""
    order = list(first)
    for place, key in enumerate(second):
        if key not in order:
            order.insert(order.index(second[place - 1]) + 1 if place else 0, key)
    return order
