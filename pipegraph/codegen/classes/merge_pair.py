"""Make one class of two that the model has under one name: with optional arguments, and branches where they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pipegraph.codegen.classes.constructor_arguments import (
    FALSE,
    MAX_ARGUMENTS,
    PER_COPY,
    TRUE,
    MergedArguments,
    assigned_attributes,
    registered_names,
)
from pipegraph.codegen.classes.merge_bodies import BodyMerger, Condition, NoConditionError, Statements
from pipegraph.codegen.classes.unify import (
    NONE,
    Difference,
    DifferentCodeError,
    InitArgument,
    Unifier,
    assigned_names,
    is_module,
    is_value,
    only_called,
    opened,
    with_numbers_of,
)
from pipegraph.codegen.syntax.expressions import (
    SELF,
    Argument,
    Attribute,
    Binary,
    Expression,
    FunctionCall,
    Literal,
    Name,
    Passing,
    call,
)
from pipegraph.codegen.syntax.statements import Assign, ClassSource, Evaluate, If, Statement

# ---- init statements -------------------------------------------------------------------------------------------------
# The statements of an ``__init__``: what each sets, and the order of those of two classes that become one.


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
    """The target of each statement → the statement. Several ``if`` with the same test are numbered."""
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


# ---- merge pair ------------------------------------------------------------------------------------------------------


# A parameter that one class lacks stands for one that it has if at least this many more statements are equal then.
_GAIN = 1.5


@dataclass(frozen=True)
class MergedPair:
    """Two classes as one.

    Attributes:
        members: the two classes.
        source: the class for both, under the name of the first.
        values: for each member, the arguments that its constructor passes on: parameter → value in terms of the
            member's arguments; None for a parameter that it does not use.
        statements_in_branches: the number of statements that only one of them runs.
    """

    members: tuple[ClassSource, ClassSource]
    source: ClassSource
    values: tuple[Mapping[str, Expression | None], Mapping[str, Expression | None]]
    statements_in_branches: int

    def constructor(self, side: int, constructor_call: FunctionCall) -> FunctionCall:
        """The call of the constructor that replaces one of a member."""
        call_arguments = {argument.name: argument.value for argument in constructor_call.arguments}

        def passed(node: Any) -> Any:
            return call_arguments[node.name] if isinstance(node, InitArgument) else node.rebuilt(passed)

        arguments: list[Argument] = []
        defaults = self.source.init_defaults
        for name, value in self.values[side].items():
            argument = defaults[name] if value is None else passed(value)
            is_default = name in defaults and argument == defaults[name]
            arguments.append(Argument(argument, name, Passing.DEFAULT if is_default else Passing.KEYWORD))
        named = [arg for arg in arguments if arg.passing is Passing.KEYWORD]
        if len(named) <= 2 and named == arguments[: len(named)] and all(arg.value.text.isdigit() for arg in named):
            arguments[: len(named)] = [replace(arg, passing=Passing.POSITIONAL) for arg in named]
        return FunctionCall(Name(self.source.name), tuple(arguments))


def merge_pair(first: ClassSource, second: ClassSource, signatures: Mapping[str, Sequence[str]]) -> MergedPair | None:
    """Make one class of two.

    An object of the class runs exactly the statements of the class that it replaces: those that both have, and those
    under conditions that hold for this class only. Such a condition is that an optional argument of ``forward`` is
    given, or a flag or an optional module that the constructor was given. A module that one class lacks, and whose
    result the other takes in place of what it is given, is an ``nn.Identity`` there.

    Args:
        first, second: classes that the model has under one name.
        signatures: the parameters of ``forward`` of each generated class.

    Returns:
        None if nothing tells the two apart, or if its constructor would have too many arguments.
    """
    if first.parameters[:1] != second.parameters[:1]:  # a Sequential passes its value by position
        return None
    if _asks_for_substituted(first, second) or _asks_for_substituted(second, first):
        return None
    pairs: list[MergedPair] = []
    for identities in (False, True):
        with suppress(NoConditionError, DifferentCodeError, TooManyArgumentsError):
            pairs.append(_PairMerger(first, second, signatures, identities).merge())
    return min(pairs, key=lambda pair: pair.statements_in_branches, default=None)


def _asks_for_substituted(first: ClassSource, second: ClassSource) -> bool:
    """Return whether one class gives an optional parameter a value where the other one asks whether it is given."""
    return any(
        name in second.optional and second.substitutes.get(name) != value for name, value in first.substitutes.items()
    )


def distance(first: ClassSource, second: ClassSource, signatures: Mapping[str, Sequence[str]]) -> float:
    """How many statements of ``forward`` two classes do not have in common."""
    one, two = opened(first, 0).forward, opened(second, 1).forward
    unifier = Unifier(_only(first, second), signatures)
    return len(one) + len(two) - 2 * BodyMerger(unifier, (), frozenset()).likeness(one, two)


def _only(first: ClassSource, second: ClassSource) -> tuple[frozenset[str], frozenset[str]]:
    """The parameters of each class that the other does not have."""
    one, two = frozenset(first.parameters), frozenset(second.parameters)
    return one - two, two - one


class TooManyArgumentsError(Exception):
    """Two classes read better than one with that many arguments."""


class _PairMerger:
    """Makes one class of two.

    Args:
        identities: whether a class has an ``nn.Identity`` for a module that only the other one has.
    """

    def __init__(
        self, first: ClassSource, second: ClassSource, signatures: Mapping[str, Sequence[str]], identities: bool
    ) -> None:
        self._members = first, second
        self._opened = opened(with_numbers_of(first, second), 0), opened(with_numbers_of(second, first), 1)
        self._only = _only(first, second)
        optional = self._optional_modules_of_each() if identities else (frozenset[str](), frozenset[str]())
        self._unifier = Unifier(self._only, signatures, optional, {**first.substitutes, **second.substitutes})
        self._optional_modules: list[Condition] = []

    def merge(self) -> MergedPair:
        first, second = self._members
        flags, other_conditions = self._attribute_conditions()
        init = self._init(self._opened[0].init, self._opened[1].init, flags or other_conditions)
        required = [name for name in first.parameters if name in second.parameters]
        required = [name for name in required if name not in first.optional | second.optional]
        parameters = dict.fromkeys((*required, *first.parameters, *second.parameters))
        parameter_conditions = [
            Condition.is_given(Name(name), side, is_parameter=True)
            for side, member in enumerate(self._members)
            for name in member.parameters
            if name in self._only[side] and name not in member.optional
        ]
        bodies = self._opened[0].forward, self._opened[1].forward
        merger = BodyMerger(
            self._unifier,
            [*parameter_conditions, *flags, *self._optional_modules, *other_conditions],
            {*parameters, *assigned_names(bodies[0]), *assigned_names(bodies[1])},
        )
        self._find_substitutes(merger, bodies)
        bodies = merger.with_named_results(*bodies)
        forward = merger.merge(*bodies)
        constants = {name for name, value in assigned_attributes(init).items() if isinstance(value, Literal)}
        arguments = MergedArguments(self._members, {*parameters, *constants, *registered_names(init)})
        closed_init, closed_forward = arguments.closed(init, in_init=True), arguments.closed(forward, in_init=False)
        assigned = assigned_attributes(closed_init)
        stored = (
            Assign((Attribute(SELF, name),), Name(name))
            for name in arguments.stored
            if assigned.get(name) != Name(name)
        )
        names = arguments.ordered()
        if len(names) > max(MAX_ARGUMENTS, *(len(member.init_parameters) + PER_COPY for member in self._members)):
            raise TooManyArgumentsError
        longer = max(self._members, key=lambda member: len(member.parameters))
        source = replace(
            first,
            docstring=longer.docstring,
            init_parameters=tuple(names),
            init_defaults=arguments.defaults,
            init_modules=frozenset(arguments.modules),
            init=(*stored, *closed_init),
            parameters=tuple(parameters),
            optional=frozenset(parameters) - {*required},
            substitutes=self._unifier.in_place_of,
            presence=tuple(dict.fromkeys((*first.presence, *second.presence, *merger.hoisted.values()))),
            forward=closed_forward,
            attributes={
                name: value for name, value in first.attributes.items() if second.attributes.get(name) == value
            },
        )
        values = tuple({name: arguments.values[name][side] for name in names} for side in (0, 1))
        return MergedPair(self._members, source, (values[0], values[1]), merger.statements_in_branches)

    def _find_substitutes(self, merger: BodyMerger, bodies: tuple[Statements, Statements]) -> None:
        """Find the parameters that one class lacks, if it reads another parameter in their place.

        A parameter that is optional in either class is not one of them: the class branches on it.
        """
        substitutes = self._unifier.in_place_of
        optional = self._members[0].optional | self._members[1].optional
        shared_parameters = [name for name in self._members[0].parameters if name in self._members[1].parameters]
        for name in sorted((self._only[0] | self._only[1]) - substitutes.keys() - optional):
            scores: dict[str | None, float] = {None: merger.likeness(*bodies, (frozenset(), frozenset()))}
            for substitute in shared_parameters:
                substitutes[name] = substitute
                scores[substitute] = merger.likeness(*bodies, (frozenset(), frozenset()))
                del substitutes[name]
            best = max(scores, key=scores.__getitem__)
            if best is not None and scores[best] >= scores[None] + _GAIN:
                substitutes[name] = best

    def _optional_modules_of_each(self) -> tuple[frozenset[str], frozenset[str]]:
        """The modules of each class that the other one lacks, and that ``forward`` only calls with one value."""
        assigned = [assigned_attributes(source.init) for source in self._opened]
        first_modules, second_modules = (
            {
                name
                for name, value in attributes.items()
                if is_module(value) and not (isinstance(value, InitArgument) and value.name in member.init_defaults)
            }
            for attributes, member in zip(assigned, self._members, strict=True)
        )
        first, second = (only_called(source.forward) for source in self._opened)
        return first & first_modules - assigned[1].keys(), second & second_modules - assigned[0].keys()

    # ---- __init__ ----------------------------------------------------------------------------------------------------

    def _attribute_conditions(self) -> tuple[list[Condition], list[Condition]]:
        """The conditions on attributes of the model's modules: on flags, and on texts, None and whole numbers."""
        flags: list[Condition] = []
        other_conditions: list[Condition] = []
        attributes = self._members[0].attributes, self._members[1].attributes
        for name, one in attributes[0].items():
            two = attributes[1].get(name)
            if two is None or one == two or "." in one.text + two.text:
                continue
            value = Difference(one, two, name)
            if {one, two} == {TRUE, FALSE}:
                flags.append(Condition.flag(value, 0 if one == TRUE else 1))
            elif NONE in (one, two):
                other_conditions.append(Condition.is_given(value, 0 if two == NONE else 1))
            else:
                other_conditions.append(Condition(Binary("==", value, one), Binary("!=", value, one), 0, value))
        return flags, other_conditions

    def _init(self, first: Statements, second: Statements, conditions: Sequence[Condition]) -> Statements:
        """The statements of ``__init__``, those of the same target next to each other."""
        one, two = places(first), places(second)
        if any(two.get(name, place) != place for name, place in one.items()):
            raise NoConditionError  # one class makes a module under a condition, the other under another one or none
        targets = [by_target(statements) for statements in (first, second)]
        return joined(
            self._set(targets[0].get(target), targets[1].get(target), conditions)
            for target in merged_order(list(targets[0]), list(targets[1]))
        )

    def _set(self, first: Statement | None, second: Statement | None, conditions: Sequence[Condition]) -> Statement:
        """The statement that sets one target."""
        if isinstance(first, If) and isinstance(second, If):
            test = self._unifier.unify(first.test, second.test)
            body = self._init(first.body, second.body, conditions)
            return If(test, body, self._init(first.orelse, second.orelse, conditions))
        try:
            common: Statement = self._unifier.unify(first, second)
        except DifferentCodeError:
            return self._differing(first, second, conditions)
        return common

    def _differing(
        self, first: Statement | None, second: Statement | None, conditions: Sequence[Condition]
    ) -> Statement:
        """A module that differs: the constructor is given it, or makes it under a condition."""
        statement = first or second
        if isinstance(statement, Assign) and is_value(statement.value) and None in (first, second):
            return statement  # the other class does not read it
        one, two = (candidate.value if isinstance(candidate, Assign) else NONE for candidate in (first, second))
        target = statement.targets[0] if isinstance(statement, Assign) else None
        if isinstance(target, Attribute) and target.owner == SELF:
            absent = [target.name in names for names in reversed(self._unifier.optional_modules)]
            one, two = (
                call("nn.Identity") if is_absent else value for is_absent, value in zip(absent, (one, two), strict=True)
            )
        has_arguments = statement is not None and any(isinstance(node, InitArgument) for node in statement.walk())
        can_be_given = all(is_module(value) or value == NONE for value in (one, two))
        makes_it = bool(conditions) and NONE in (one, two) and not has_arguments
        if makes_it or not (isinstance(target, Attribute) and target.owner == SELF and can_be_given):
            if not conditions:
                raise NoConditionError
            return conditions[0].branch([first] if first else [], [second] if second else [])
        if NONE in (one, two):
            side = 0 if two == NONE else 1
            module = two if side else one
            # A class that was merged before may itself be made without the module.
            if not (isinstance(module, InitArgument) and module.name in self._members[side].init_defaults):
                self._optional_modules.append(Condition.is_given(target, side))
        return Assign((target,), Difference(one, two, target.name, is_module=True))
