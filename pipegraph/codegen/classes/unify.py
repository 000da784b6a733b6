"""What two classes have in common: their code, with a difference in place of each value that is not the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pipegraph.codegen.syntax.expressions import (
    SELF,
    Argument,
    Attribute,
    Expression,
    FunctionCall,
    Literal,
    ModuleInvocation,
    Name,
    Node,
    Passing,
    Subscript,
)
from pipegraph.codegen.syntax.statements import Assign, ClassSource, Statement

NONE = Literal("None")


@dataclass(frozen=True)
class InitArgument(Expression):
    """An argument of the constructor of one of two classes, in every place that reads it.

    Attributes:
        name: of the argument.
        side: 0 for the first class, 1 for the second.
        is_module: whether it is a module.
    """

    name: str
    side: int
    is_module: bool

    @property
    def text(self) -> str:
        return self.name


@dataclass(frozen=True)
class Difference(Expression):
    """The values that two classes have at one place: an argument of the constructor of the class for both.

    Attributes:
        first, second: the values; None if that class does not use it.
        name: what it is called there.
        is_module: whether it is a module.
    """

    first: Expression | None
    second: Expression | None
    name: str
    is_module: bool = False

    @property
    def text(self) -> str:
        return self.name


def stored_name(statement: Statement, parameters: Container[str]) -> str | None:
    """The argument that a statement of ``__init__`` keeps as an attribute of its name: ``self.size = size``."""
    if isinstance(statement, Assign) and isinstance(statement.value, Name) and statement.value.name in parameters:
        name = statement.value.name
        return name if statement.targets == (Attribute(SELF, name),) else None
    return None


def opened(source: ClassSource, side: int) -> ClassSource:
    """A class with `InitArgument` in place of the arguments of its constructor.

    Statements that keep a number as an attribute are left out; those that keep a module stay.
    """
    names = set(source.init_parameters)

    def argument(name: str) -> InitArgument:
        return InitArgument(name, side, name in source.init_modules)

    def in_init(node: Any) -> Any:
        if isinstance(node, Name) and node.name in names:
            return argument(node.name)
        return node.rebuilt(in_init)

    def in_forward(node: Any) -> Any:
        if isinstance(node, Attribute) and node.owner == SELF and node.name in names - source.init_modules:
            return argument(node.name)
        return node.rebuilt(in_forward)

    statements = [statement for statement in source.init if stored_name(statement, names - source.init_modules) is None]
    init, forward = tuple(map(in_init, statements)), tuple(map(in_forward, source.forward))
    return replace(source, init=init, forward=forward)


def with_numbers_of(source: ClassSource, other_class: ClassSource) -> ClassSource:
    """A class with numbers in place of ``self.size``, if the constructor of another one is given that number."""
    names = {name for node in other_class.init if (name := stored_name(node, other_class.init_parameters)) is not None}
    numbers = {
        node.targets[0]: node.value
        for node in source.init
        if isinstance(node, Assign) and isinstance(node.value, Literal) and node.value.is_number
        if isinstance(node.targets[0], Attribute) and node.targets[0].name in names - other_class.init_modules
    }
    if not numbers:
        return source

    def read(node: Any) -> Any:
        return numbers[node] if node in numbers else node.rebuilt(read)

    statements = (node for node in source.init if not (isinstance(node, Assign) and node.targets[0] in numbers))
    return replace(source, init=tuple(statements), forward=tuple(map(read, source.forward)))


def assigned_names(statements: Iterable[Statement]) -> set[str]:
    """The variables that statements assign."""
    names: set[str] = set()
    for statement in statements:
        for node in statement.walk():
            if isinstance(node, Assign):
                names.update(target.name for target in node.targets if isinstance(target, Name))
    return names


def only_called(statements: Iterable[Statement]) -> frozenset[str]:
    """The attributes that statements mention only to call them with one value."""
    nodes = [node for statement in statements for node in statement.walk()]
    mentioned = Counter(node.name for node in nodes if isinstance(node, Attribute) and node.owner == SELF)
    called = Counter(
        node.function.name
        for node in nodes
        if isinstance(node, FunctionCall) and isinstance(node.function, Attribute) and len(node.arguments) == 1
    )
    return frozenset(name for name, count in mentioned.items() if called[name] == count)


class DifferentCodeError(Exception):
    """Two pieces of code have no common form."""


@dataclass
class Unifier:
    """Puts equal code of two classes together.

    Attributes:
        only: for each class, the parameters of ``forward`` that the other class does not have.
        signatures: the parameters of ``forward`` of each generated class.
        optional_modules: for each class, the modules for which the other class has an ``nn.Identity``.
        in_place_of: a parameter that one class lacks → the parameter that this class reads in its place.
        assigned: for each class, the variables that are assigned before the code to unify.
    """

    only: tuple[frozenset[str], frozenset[str]]
    signatures: Mapping[str, Sequence[str]]
    optional_modules: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    in_place_of: dict[str, str] = field(default_factory=dict)
    assigned: tuple[Set[str], Set[str]] = (frozenset(), frozenset())

    def unify(self, first: Any, second: Any, name: str = "size") -> Any:
        """The common code of two nodes, with a `Difference` for each value in which they differ.

        Args:
            name: what a difference is called if the nodes are values.

        Raises:
            DifferentCodeError: they differ in more than values.
        """
        if first == second:
            return first
        for side, node in enumerate((first, second)):
            if self._is_optional(node, side):
                (argument,) = node.arguments
                pair = (argument.value, second) if side == 0 else (first, argument.value)
                return replace(node, arguments=(argument.changed(self.unify(*pair)),))
        if is_value(first) and is_value(second):
            is_whole = not any("." in value.text or "e-" in value.text for value in (first, second))
            return Difference(first, second, name if is_whole or name != "size" else "value")
        if isinstance(first, Name) and isinstance(second, Name):
            return self._parameter(first, second)
        if isinstance(first, ModuleInvocation) and isinstance(second, ModuleInvocation):
            return self._invocation(first, second)
        if isinstance(first, FunctionCall) and isinstance(second, FunctionCall):
            return self._call(first, second)
        if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
            return tuple(self.unify(one, two, name) for one, two in zip(first, second, strict=True))
        is_target = isinstance(first, Assign) and isinstance(second, Assign) and first.targets != second.targets
        if type(first) is not type(second) or not isinstance(first, Node) or isinstance(first, Literal) or is_target:
            raise DifferentCodeError
        names = [entry.name for entry in fields(first)]  # type: ignore[arg-type]
        name = "index" if isinstance(first, Subscript) else "size"
        parts = {attr: self.unify(getattr(first, attr), getattr(second, attr), name) for attr in names}
        return replace(first, **parts)  # type: ignore[type-var]

    def _is_optional(self, node: Any, side: int) -> bool:
        """Return whether a node calls a module for which the other class has an ``nn.Identity``."""
        is_call = (
            isinstance(node, FunctionCall) and isinstance(node.function, Attribute) and node.function.owner == SELF
        )
        return is_call and node.function.name in self.optional_modules[side] and len(node.arguments) == 1

    def _parameter(self, first: Name, second: Name) -> Name:
        """A parameter that only one class has, if the other reads its own parameter in its place."""
        for side, (name, other_name) in enumerate(((first, second), (second, first))):
            replaces = name.name in self.only[side] and self.in_place_of.get(name.name) == other_name.name
            assigned = name.name in self.assigned[0] | self.assigned[1] or other_name.name in self.assigned[1 - side]
            if replaces and not assigned:
                return name
        raise DifferentCodeError

    def _call(self, first: FunctionCall, second: FunctionCall) -> FunctionCall:
        function = self.unify(first.function, second.function)
        names = [[arg.name for arg in call.arguments] for call in (first, second)]
        if names[0] != names[1]:
            raise DifferentCodeError
        arguments: list[Argument] = []
        for one, two in zip(first.arguments, second.arguments, strict=True):
            argument = one if one.passing is Passing.DEFAULT else two
            like = argument if argument.passing is not Passing.POSITIONAL else one
            arguments.append(like.changed(self._argument(one, two)))
        return FunctionCall(function, tuple(arguments))

    def _argument(self, first: Argument, second: Argument) -> Expression:
        try:
            value: Expression = self.unify(first.value, second.value, first.name or "size")
        except DifferentCodeError:
            values = (first.value, second.value)
            modules = all(is_module(value) or value == NONE for value in values)
            if not first.name or not (modules or all(is_value(value) or value == NONE for value in values)):
                raise
            return Difference(*values, first.name, modules)
        return value

    def _invocation(self, first: ModuleInvocation, second: ModuleInvocation) -> ModuleInvocation:
        """The call of a module with the arguments of both calls. What one leaves out is None in that class."""
        function = self.unify(first.function, second.function)
        classes = tuple(dict.fromkeys((*first.classes, *second.classes)))
        arguments = [{argument.name: argument.value for argument in call.arguments} for call in (first, second)]
        signatures = {tuple(self.signatures[name]) for name in classes}
        if len(signatures) > 1:  # by position: the two modules call their parameters differently
            if first.classes == second.classes or not (_is_positional(first) and _is_positional(second)):
                raise DifferentCodeError
            one, two = (tuple(argument.value for argument in call.arguments) for call in (first, second))
            named = zip(self.unify(one, two), first.arguments, strict=True)
            return ModuleInvocation(function, tuple(Argument(value, arg.name) for value, arg in named), classes)
        values: dict[str, Expression] = {}
        for name in dict.fromkeys((*arguments[0], *arguments[1])):
            expressions = [call_arguments[name] for call_arguments in arguments if name in call_arguments]
            side = int(name not in arguments[0])
            left_out = len(expressions) == 1
            if left_out and not self._is_none_in_other(expressions[0], side):
                raise DifferentCodeError
            values[name] = expressions[0] if left_out else self.unify(expressions[0], expressions[1])
        return ModuleInvocation(function, ordered_arguments(values, min(signatures)), classes)

    def _is_none_in_other(self, value: Expression, side: int) -> bool:
        """Return whether a value is a parameter that only one class has, so that it is None in the other."""
        changed = self.assigned[0] | self.assigned[1] | self.in_place_of.keys()
        return isinstance(value, Name) and value.name in self.only[side] - changed


def ordered_arguments(values: Mapping[str, Expression], signature: Sequence[str]) -> tuple[Argument, ...]:
    """Arguments in the order of a signature; from the first one that is left out they are passed by name."""
    arguments: list[Argument] = []
    passing = Passing.POSITIONAL
    for name in signature:
        if name in values:
            arguments.append(Argument(values[name], name, passing))
        else:
            passing = Passing.KEYWORD
    return tuple(arguments)


def _is_positional(call: FunctionCall) -> bool:
    return all(argument.passing is Passing.POSITIONAL for argument in call.arguments)


def is_value(node: object) -> bool:
    """Return whether a node is a number, or an argument of a constructor that is not a module."""
    return (isinstance(node, Literal) and node.is_number) or (isinstance(node, InitArgument) and not node.is_module)


def is_module(node: object) -> bool:
    """Return whether an expression of ``__init__`` makes a module or a parameter, or is an argument that is one."""
    if isinstance(node, FunctionCall) and isinstance(node.function, Name):
        return node.function.name[:1].isupper() or node.function.name.startswith("nn.")
    return isinstance(node, InitArgument) and node.is_module
