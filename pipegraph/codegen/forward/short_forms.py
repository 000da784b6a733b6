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
    body = _Shortening(statements).run(statements)
    return _folded(body, _mentions(body))


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
        body: list[Statement] = []
        for statement in statements:
            listed = self._listed(body[-1], statement) if body else None
            added = _augmented(body[-2:], statement)
            if listed is not None:
                body[-1] = listed
            elif added is not None and self._mentions[added[1].name] == 3 * self._parts[added[1].name]:
                body[-2:] = [added[0]]
            else:
                body.append(_with_bodies(statement, self.run))
        return tuple(body)

    def _listed(self, previous_statement: Statement, loop: Statement) -> Assign | None:
        """One statement for ``outs = []`` and a loop that appends to it.

        None if the two statements are not of this form, or if the one statement is too long.
        """
        if not isinstance(loop, For) or loop.list_name is None or not isinstance(previous_statement, Assign):
            return None
        (name, *other_targets), (*assigned, last) = previous_statement.targets, loop.body
        if other_targets or previous_statement.value != Collection((), "[]") or not isinstance(last, Evaluate):
            return None
        match last.value:
            case FunctionCall(function=Attribute(owner=owner, name="append"), arguments=(argument,)) if owner == name:
                element = argument.value
            case _:
                return None
        inside = _mentions([loop])
        for assign in reversed(assigned):
            if not isinstance(assign, Assign) or len(assign.targets) > 1 or not isinstance(assign.targets[0], Name):
                return None
            variable = assign.targets[0]
            is_read_later = inside[variable.name] != self._mentions[variable.name]
            if is_read_later or _mentions([element])[variable.name] != 1:
                return None
            element = _replaced(element, variable, assign.value)
        comprehension = _Comprehension(element, loop.variables, loop.iterable, not loop.list_name)
        return Assign((name,), comprehension) if len(comprehension.text) <= _LONGEST else None


def _with_bodies(statement: Statement, change: Any) -> Statement:
    """A statement with its bodies changed."""
    if isinstance(statement, If):
        return replace(statement, body=change(statement.body), orelse=change(statement.orelse))
    if isinstance(statement, CompoundStatement):
        changed: Statement = replace(statement, body=change(statement.body))  # type: ignore[type-var]
        return changed
    return statement


def _augmented(previous_statements: Sequence[Statement], last: Statement) -> tuple[_AugmentedAssign, Name] | None:
    """``x[:, 0] += y``, and the variable of ``part = x[:, 0]``, ``part.add_(y)`` and ``x[:, 0] = part``."""
    match (*previous_statements, last):
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
        augmentation = _augmented(statements[max(0, at - 2) : at], statement)
        if augmentation is not None:
            yield augmentation
        if isinstance(statement, CompoundStatement):
            yield from _augmented_in(statement.body)
        if isinstance(statement, If):
            yield from _augmented_in(statement.orelse)


def _folded(statements: Sequence[Statement], mentions: Counter[str]) -> tuple[Statement, ...]:
    """Statements with each comprehension inside the one that reads it, if that is the next and the source has it so."""
    folded_statements: list[Statement] = []
    for statement in statements:
        statement = _with_bodies(statement, lambda body: _folded(body, mentions))
        previous = folded_statements[-1] if folded_statements else None
        if isinstance(previous, Assign) and isinstance(previous.value, _Comprehension) and previous.value.is_part:
            (name,) = previous.targets
            combined = _replaced(statement, name, previous.value)
            is_only = mentions[name.text] == 2 and _mentions([statement])[name.text] == 1
            if is_only and not isinstance(statement, CompoundStatement) and len(combined.text) <= _LONGEST_STATEMENT:
                folded_statements[-1] = combined
                continue
        folded_statements.append(statement)
    return tuple(folded_statements)


def _replaced(node: Part, name: Expression, value: Expression) -> Part:
    def change(part: Any) -> Any:
        return value if part == name else part.rebuilt(change)

    changed: Part = change(node)
    return changed
