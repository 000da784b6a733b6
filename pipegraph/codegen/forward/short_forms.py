"""The short forms of statements: comprehensions where the model's source has them, and ``x[:, 0] += y``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pipegraph.codegen.syntax.expressions import (
    Argument,
    Attribute,
    Collection,
    Expression,
    FunctionCall,
    Name,
    Node,
    Passing,
    Subscript,
)
from pipegraph.codegen.syntax.statements import Assign, CompoundStatement, Evaluate, For, If, Statement

Part = TypeVar("Part", bound=Node)

# The greatest length of a comprehension, and of a statement with one inside.
_LONGEST, _LONGEST_STATEMENT = 96, 108


@dataclass(frozen=True)
class _Comprehension(Expression):
    """``[element for variables in iterable]``.

    Attributes:
        is_part: whether it is a part of a longer expression in the model's source.
    """

    element: Expression
    variables: tuple[str, ...]
    iterable: Expression
    is_part: bool

    @property
    def text(self) -> str:
        return f"[{self.element.text} for {', '.join(self.variables)} in {self.iterable.text}]"


@dataclass(frozen=True)
class _AugmentedAssign(Statement):
    """``target += value``."""

    target: Expression
    symbol: str
    value: Expression

    @property
    def text(self) -> str:
        return f"{self.target.text} {self.symbol}= {self.value.text}"


_IN_PLACE = {"add_": "+", "sub_": "-", "mul_": "*", "div_": "/"}


def shortened(statements: Sequence[Statement]) -> tuple[Statement, ...]:
    """The body of a function, with ``outs = [head(y) for head in self.heads]`` in place of loops that fill a list.

    What is part of a longer expression in the source goes into it, ``torch.cat([head(y) for head in self.heads])``, if
    nothing else reads the list. The three statements that ``x[:, 0] += y`` runs become that one.
    """
    made = _Shortening(statements).run(statements)
    return _folded(made, _mentions(made))


def _mentions(nodes: Iterable[Node]) -> Counter[str]:
    """How often variables are mentioned."""
    return Counter(part.name for node in nodes for part in node.walk() if isinstance(part, Name))


class _Shortening:
    """Comprehensions and augmented assignments of a function.

    Args:
        statements: its body.
    """

    def __init__(self, statements: Sequence[Statement]) -> None:
        self._mentions = _mentions(statements)
        self._parts = Counter(part.name for _, part in _augmented_in(statements))

    def run(self, statements: Sequence[Statement]) -> tuple[Statement, ...]:
        """Statements in their short forms."""
        made: list[Statement] = []
        for statement in statements:
            listed = self._listed(made[-1], statement) if made else None
            added = _augmented(made[-2:], statement)
            if listed is not None:
                made[-1] = listed
            elif added is not None and self._mentions[added[1].name] == 3 * self._parts[added[1].name]:
                made[-2:] = [added[0]]
            else:
                made.append(_with_bodies(statement, self.run))
        return tuple(made)

    def _listed(self, before: Statement, loop: Statement) -> Assign | None:
        """The statement for ``outs = []`` and a loop that appends to it; None if it is none, or too long."""
        if not isinstance(loop, For) or loop.list_name is None or not isinstance(before, Assign):
            return None
        (name, *others), (*assigned, last) = before.targets, loop.body
        if others or before.value != Collection((), "[]") or not isinstance(last, Evaluate):
            return None
        match last.value:
            case FunctionCall(function=Attribute(owner=owner, name="append"), arguments=(argument,)) if owner == name:
                element = argument.value
            case _:
                return None
        inside = _mentions([loop])
        for each in reversed(assigned):
            if not isinstance(each, Assign) or len(each.targets) > 1 or not isinstance(each.targets[0], Name):
                return None
            variable = each.targets[0]
            is_read_later = inside[variable.name] != self._mentions[variable.name]
            if is_read_later or _mentions([element])[variable.name] != 1:
                return None
            element = _replaced(element, variable, each.value)
        made = _Comprehension(element, loop.variables, loop.iterable, not loop.list_name)
        return Assign((name,), made) if len(made.text) <= _LONGEST else None


def _with_bodies(statement: Statement, change: Any) -> Statement:
    """A statement with its bodies changed."""
    if isinstance(statement, If):
        return replace(statement, body=change(statement.body), other=change(statement.other))
    if isinstance(statement, CompoundStatement):
        changed: Statement = replace(statement, body=change(statement.body))  # type: ignore[type-var]
        return changed
    return statement


def _augmented(before: Sequence[Statement], last: Statement) -> tuple[_AugmentedAssign, Name] | None:
    """``x[:, 0] += y``, and the variable of ``part = x[:, 0]``, ``part.add_(y)`` and ``x[:, 0] = part``."""
    match (*before, last):
        case (
            Assign(targets=(Name() as part,), value=Subscript() as place),
            Evaluate(
                value=FunctionCall(
                    function=Attribute(owner=owner, name=name),
                    arguments=(Argument(value=value, passing=Passing.POSITIONAL),),
                )
            ),
            Assign(targets=(target,), value=stored),
        ) if owner == stored == part and target == place and name in _IN_PLACE:
            return _AugmentedAssign(place, _IN_PLACE[name], value), part
    return None


def _augmented_in(statements: Sequence[Statement]) -> Iterator[tuple[_AugmentedAssign, Name]]:
    """All of them, also inside of other statements."""
    for at, statement in enumerate(statements):
        found = _augmented(statements[max(0, at - 2) : at], statement)
        if found is not None:
            yield found
        if isinstance(statement, CompoundStatement):
            yield from _augmented_in(statement.body)
        if isinstance(statement, If):
            yield from _augmented_in(statement.other)


def _folded(statements: Sequence[Statement], mentions: Counter[str]) -> tuple[Statement, ...]:
    """Statements with each comprehension inside the one that reads it, if that is the next and the source has it so."""
    made: list[Statement] = []
    for statement in statements:
        statement = _with_bodies(statement, lambda body: _folded(body, mentions))
        before = made[-1] if made else None
        if isinstance(before, Assign) and isinstance(before.value, _Comprehension) and before.value.is_part:
            (name,) = before.targets
            whole = _replaced(statement, name, before.value)
            is_only = mentions[name.text] == 2 and _mentions([statement])[name.text] == 1
            if is_only and not isinstance(statement, CompoundStatement) and len(whole.text) <= _LONGEST_STATEMENT:
                made[-1] = whole
                continue
        made.append(statement)
    return tuple(made)


def _replaced(node: Part, name: Expression, value: Expression) -> Part:
    def change(part: Any) -> Any:
        return value if part == name else part.rebuilt(change)

    changed: Part = change(node)
    return changed
