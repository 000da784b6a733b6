"""Merge the statements of two classes: what is equal stands once, what is not stands under a condition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import accumulate
from operator import or_

from pipegraph.codegen.classes.unify import DifferentCodeError, Unifier, assigned_names
from pipegraph.codegen.names.identifiers import unused
from pipegraph.codegen.syntax.expressions import Expression, Name, is_none, unary
from pipegraph.codegen.syntax.statements import Assign, If, Return, Statement

Statements = tuple[Statement, ...]
Assigned = tuple[AbstractSet[str], AbstractSet[str]]


@dataclass(frozen=True)
class Condition:
    """A test that tells two classes apart.

    Attributes:
        expression, negation: the test and its contrary.
        side: the class for which ``expression`` holds.
        word: the name or the attribute that it reads.
        parameter: whether that is a parameter of ``forward``, which statements may assign.
    """

    expression: Expression
    negation: Expression
    side: int
    word: Expression
    is_parameter: bool = False

    @classmethod
    def is_given(cls, value: Expression, side: int, is_parameter: bool = False) -> Condition:
        """``value is not None``."""
        return cls(is_none(value, negated=True), is_none(value), side, value, is_parameter)

    @classmethod
    def flag(cls, value: Expression, side: int) -> Condition:
        """``value``, which is true or false."""
        return cls(value, unary("not ", value), side, value)

    def branch(self, first: Sequence[Statement], second: Sequence[Statement]) -> If:
        """``if``, with the statements of the two classes."""
        body, orelse = (first, second) if self.side == 0 else (second, first)
        return If(self.expression, tuple(body), tuple(orelse)) if body else If(self.negation, tuple(orelse))


class NoConditionError(Exception):
    """No condition tells two classes apart."""


@dataclass
class BodyMerger:
    """Merges the bodies of two functions.

    Attributes:
        unifier: finds what two statements have in common.
        conditions: those that tell the two classes apart, the best ones first.
        reserved: names that a new variable must not have.
        hoisted: the conditions that the function has to evaluate before it assigns a parameter, as statements.
        statements_in_branches: the number of statements under a new condition.
    """

    unifier: Unifier
    conditions: Sequence[Condition]
    reserved: AbstractSet[str]
    hoisted: dict[Condition, Assign] = field(default_factory=dict)
    statements_in_branches: int = 0

    def __post_init__(self) -> None:
        self._relevant = self.unifier.only[0] | self.unifier.only[1] | self.reserved
        self._likenesses: dict[object, float] = {}
        self._assigned_by: dict[Statement, AbstractSet[str]] = {}

    def merge(
        self, first: Statements, second: Statements, assigned: Assigned = (frozenset(), frozenset())
    ) -> Statements:
        """Merge the statements of two bodies.

        Args:
            assigned: the variables that the statements before assign, in each class.

        Raises:
            NoConditionError: they differ, and nothing tells the classes apart.
        """
        merged: list[Statement] = []
        scopes = self._assigned_before(first, second, assigned)
        starts = [0, 0]
        for pair in (*self._aligned(first, second, scopes), (len(first), len(second))):
            first_part, second_part = first[starts[0] : pair[0]], second[starts[1] : pair[1]]
            if first_part or second_part:
                changed = scopes[0][starts[0]] | scopes[1][starts[1]] | self.unifier.in_place_of.keys()
                merged.append(self._branch(first_part, second_part, changed))
            if pair != (len(first), len(second)):
                merged.append(self._common(first[pair[0]], second[pair[1]], (scopes[0][pair[0]], scopes[1][pair[1]])))
            starts = [pair[0] + 1, pair[1] + 1]
        return tuple(merged)

    def with_named_results(self, first: Statements, second: Statements) -> tuple[Statements, Statements]:
        """Two bodies with ``x = f(x); return x`` for ``return f(x)``, if the other body assigns that to ``x``."""
        return self._with_named_result(first, second, 0), self._with_named_result(second, first, 1)

    def _with_named_result(self, body: Statements, other_body: Statements, side: int) -> Statements:
        last = body[-1] if body else None
        if not isinstance(last, Return) or last.count != 1 or isinstance(last.values[0], Name):
            return body
        for statement in reversed(other_body):
            if isinstance(statement, Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], Name):
                assign = Assign(statement.targets, last.values[0])
                pair = (assign, statement) if side == 0 else (statement, assign)
                if self._statement_likeness(*pair, (assigned_names(body), assigned_names(other_body))):
                    return *body[:-1], assign, Return(statement.targets)
        return body

    def likeness(self, first: Statements, second: Statements, assigned: Assigned = (frozenset(), frozenset())) -> float:
        """How many statements two bodies have in common."""
        scopes = self._assigned_before(first, second, assigned)
        return sum(
            self._statement_likeness(first[i], second[j], (scopes[0][i], scopes[1][j]))
            for i, j in self._aligned(first, second, scopes)
        )

    def _common(self, first: Statement, second: Statement, assigned: Assigned) -> Statement:
        """Two statements that have a common form."""
        self.unifier.assigned = assigned
        if isinstance(first, If) and isinstance(second, If):
            test = self.unifier.unify(first.test, second.test)
            body = self.merge(first.body, second.body, assigned)
            return If(test, body, self.merge(first.orelse, second.orelse, assigned))
        common: Statement = self.unifier.unify(first, second)
        return common

    def _branch(self, first: Statements, second: Statements, assigned: AbstractSet[str]) -> Statement:
        """Put statements that only one class has under the condition that says most about them."""
        self.statements_in_branches += _count(first) + _count(second)
        mentioned = {
            node for statement in (*first, *second) for node in statement.walk() if isinstance(node, Expression)
        }
        unchanged = [
            candidate
            for candidate in self.conditions
            if not (candidate.is_parameter and isinstance(candidate.word, Name) and candidate.word.name in assigned)
        ]
        condition = next((candidate for candidate in unchanged if candidate.word in mentioned), None)
        condition = condition or next(iter(unchanged), None)
        if condition is None:
            if not self.conditions:
                raise NoConditionError
            condition = self._hoist(self.conditions[0])
        return condition.branch(first, second)

    def _hoist(self, condition: Condition) -> Condition:
        """A condition that reads a variable which holds what another condition says at the beginning."""
        if condition not in self.hoisted:
            names = {*self.reserved, *(target.text for assign in self.hoisted.values() for target in assign.targets)}
            variable = Name(unused(f"has_{condition.word.text}", names))
            self.hoisted[condition] = Assign((variable,), condition.expression)
        (name,) = self.hoisted[condition].targets
        return Condition.flag(name, condition.side)

    def _aligned(
        self,
        first: Statements,
        second: Statements,
        scopes: tuple[Sequence[AbstractSet[str]], Sequence[AbstractSet[str]]],
    ) -> Iterator[tuple[int, int]]:
        """The places of the longest common subsequence of statements."""
        likeness = {
            (i, j): self._statement_likeness(one, two, (scopes[0][i], scopes[1][j]))
            for i, one in enumerate(first)
            for j, two in enumerate(second)
        }
        best = [[0.0] * (len(second) + 1) for _ in range(len(first) + 1)]
        for i in reversed(range(len(first))):
            for j in reversed(range(len(second))):
                paired = likeness[i, j] + best[i + 1][j + 1] if likeness[i, j] else 0
                best[i][j] = max(paired, best[i + 1][j], best[i][j + 1])
        i = j = 0
        while i < len(first) and j < len(second):
            if likeness[i, j] and best[i][j] == likeness[i, j] + best[i + 1][j + 1]:
                yield i, j
                i, j = i + 1, j + 1
            elif best[i][j] == best[i + 1][j]:
                i += 1
            else:
                j += 1

    def _statement_likeness(self, first: Statement, second: Statement, assigned: Assigned) -> float:
        """1 for equal statements, a little less for those that differ in values; for ``if``, that of their bodies."""
        if type(first) is not type(second):
            return 0
        relevant_names = frozenset(assigned[0] & self._relevant), frozenset(assigned[1] & self._relevant)
        key = first, second, relevant_names, tuple(self.unifier.in_place_of.items())
        if key not in self._likenesses:
            self._likenesses[key] = self._compare(first, second, assigned)
        return self._likenesses[key]

    def _compare(self, first: Statement, second: Statement, assigned: Assigned) -> float:
        if isinstance(first, If) and isinstance(second, If):
            if first.test.text != second.test.text:
                return 0
            return self.likeness(first.body, second.body, assigned) + self.likeness(
                first.orelse, second.orelse, assigned
            )
        self.unifier.assigned = assigned
        try:
            common = self.unifier.unify(first, second)
        except DifferentCodeError:
            return 0
        return 1 if common == first else 0.9

    def _assigned_before(
        self, first: Statements, second: Statements, assigned: Assigned
    ) -> tuple[Sequence[AbstractSet[str]], Sequence[AbstractSet[str]]]:
        """For each body, the variables that are assigned before each statement, and before its end."""
        sides = zip((first, second), assigned, strict=True)
        one, two = (list(accumulate(map(self._assigned, body), or_, initial=names)) for body, names in sides)
        return one, two

    def _assigned(self, statement: Statement) -> AbstractSet[str]:
        if statement not in self._assigned_by:
            self._assigned_by[statement] = assigned_names([statement])
        return self._assigned_by[statement]


def _count(statements: Statements) -> int:
    return sum(1 for statement in statements for node in statement.walk() if isinstance(node, Statement))
