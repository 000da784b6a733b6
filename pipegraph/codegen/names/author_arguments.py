"""Read the names of the arguments that the author's constructor of a class passes to other constructors."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from pipegraph.codegen.names.source_statements import functions_in, source_tree

Arguments = Mapping[str, str]
"""Parameter, or position, of a constructor → the name of the variable or attribute that is passed for it."""


def position_name(position: int) -> str:
    """The key of an argument that is passed by its position, of a function whose parameters are not known."""
    return f"[{position}]"


@dataclass(frozen=True)
class AuthorArguments:
    """The arguments that a constructor passes on by name.

    ``self.proj = nn.Linear(config.width, hidden)`` passes ``width`` and ``hidden`` for ``in_features`` and
    ``out_features`` of the first ``Linear`` of ``proj``.

    Attributes:
        calls: attribute and name of a class → the arguments of each call of the class in that statement, in order.
        parameters: of the constructor, in order.
    """

    calls: Mapping[tuple[str, str], tuple[Arguments, ...]] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()

    def name(self, attribute: str, class_name: str, parameter: str, index: int, count: int) -> str:
        """The name of an argument; empty if the constructor has none.

        Args:
            attribute: the attribute that the statement assigns.
            class_name: the class that the call makes.
            parameter: the parameter, or `position_name` of an argument.
            index, count: which call of the class it is in the statement, and how many there are.
        """
        calls = self.calls.get((attribute, class_name), ())
        if len(calls) == count:
            return calls[index].get(parameter, "")
        names = {call.get(parameter, "") for call in calls}
        return names.pop() if len(names) == 1 else ""


def author_arguments_of(module_class: type) -> AuthorArguments:
    """Return the arguments that the constructor of a class passes on by name."""
    constructor = _constructor(module_class)
    return _author_arguments(constructor) if constructor is not None else AuthorArguments()


@functools.cache
def _author_arguments(constructor: FunctionType) -> AuthorArguments:
    tree, namespace = _statement(constructor), constructor.__globals__
    if tree is None:
        return AuthorArguments()
    calls: dict[tuple[str, str], tuple[Arguments, ...]] = {}
    loops = ((attribute, loop) for loop in ast.walk(tree) if (attribute := _attribute_extended(loop)))
    for attribute, node in (*_attributes_assigned(tree), *loops):
        for called, arguments in _calls(node, namespace):
            calls[attribute, called] = (*calls.get((attribute, called), ()), arguments)
    return AuthorArguments(calls, tuple(inspect.signature(constructor).parameters))


def attributes_assigned(module_class: type) -> Iterator[tuple[str, ast.expr]]:
    """Yield the attributes that the constructor of a class assigns, each with the expression; also those of a tuple,
    ``self.scale, self.heads = dim**-0.5, heads``."""
    constructor = _constructor(module_class)
    tree = _statement(constructor) if constructor is not None else None
    if tree is not None:
        yield from _attributes_assigned(tree)


def _attributes_assigned(tree: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    for statement in ast.walk(tree):
        match statement:
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
                pairs = zip(targets, values, strict=True)
                yield from ((target.attr, value) for target, value in pairs if isinstance(target, ast.Attribute))
        name = _attribute_assigned(statement)
        if name and isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            yield name, statement.value


def default_numbers(module_class: type) -> dict[str, int | float]:
    """The numbers that parameters of the constructor of a class have by default."""
    constructor = _constructor(module_class)
    parameters = inspect.signature(constructor).parameters if constructor is not None else {}
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    return {name: default for name, default in defaults.items() if type(default) in (int, float)}


def _constructor(module_class: Any) -> FunctionType | None:
    """The constructor of a class; None if it is not written in Python."""
    constructor = inspect.unwrap(module_class.__init__)
    return constructor if isinstance(constructor, FunctionType) else None


@functools.cache
def _statement(constructor: FunctionType) -> ast.FunctionDef | None:
    code = constructor.__code__
    functions = functions_in(source_tree(code.co_filename))
    return next((node for node in functions if _first_line(node) == code.co_firstlineno), None)


def _attribute_extended(loop: ast.AST) -> str:
    """The only list of ``self`` to which a loop appends modules; empty without one."""
    names = set[str]()
    for node in ast.walk(loop) if isinstance(loop, ast.For) else ():
        match node:
            case ast.Call(ast.Attribute(ast.Attribute(ast.Name("self"), name), "append")):
                names.add(name)
    return names.pop() if len(names) == 1 else ""


def _first_line(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _attribute_assigned(statement: ast.AST) -> str:
    """The attribute of ``self`` that a statement assigns; empty if it assigns something else."""
    match statement:
        case ast.Assign([ast.Attribute(ast.Name("self"), name)]) | ast.AnnAssign(ast.Attribute(ast.Name("self"), name)):
            return name
    return ""


def _calls(value: ast.AST, namespace: Mapping[str, Any]) -> Iterator[tuple[str, Arguments]]:
    """Yield the calls in an expression or a loop, in the order of the text: name of the class, and arguments."""
    calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        function = _value_of(call.func, namespace)
        name = getattr(function, "__name__", ast.unparse(call.func).rpartition(".")[2])
        yield name, _arguments(call, function)


def _value_of(node: ast.expr, namespace: Mapping[str, Any]) -> Any:
    """The class or the function of a call; None if it is in a variable."""
    match node:
        case ast.Name(name):
            return namespace.get(name)
        case ast.Attribute(owner, name):
            return getattr(_value_of(owner, namespace), name, None)
    return None


def _arguments(call: ast.Call, function: Any) -> Arguments:
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        parameters = []
    arguments: dict[str, str] = {}
    for position, argument in enumerate(call.args):
        arguments[position_name(position)] = _name(argument)
        if position < len(parameters):
            arguments[parameters[position]] = _name(argument)
    arguments |= {keyword.arg: _name(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    return {parameter: name for parameter, name in arguments.items() if name}


def _name(argument: ast.expr) -> str:
    """``width`` for ``width``, ``self.width`` and ``config.width``."""
    match argument:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""
