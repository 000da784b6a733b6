"""The text of a function of the model's source that needs nothing but torch: what it reads from around it is in it."""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import inspect
import linecache
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_LIBRARIES: Final = {"torch": torch, "F": F, "nn": nn, "math": math}
"""The name in the text → the module."""
_BUILTINS: Final = frozenset(
    {"abs", "all", "any", "dict", "enumerate", "float", "int", "isinstance", "len", "list", "max", "min", "range"}
    | {"reversed", "round", "setattr", "slice", "sum", "tuple", "zip"}
)
"""The built-in functions that have no effect except what they return or set."""
_REFUSED: Final = {
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.Import: "import",
    ast.ImportFrom: "import",
    ast.ClassDef: "class",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
    ast.Await: "await",
}


class NotPortableError(Exception):
    """A function needs something that its text cannot have. The message names it."""


@dataclass(frozen=True)
class FunctionText:
    """The text of a function.

    Attributes:
        name: of the function; empty for a lambda.
        text: ``lambda gradient: gradient * _tensor_0``.
        tensors: the tensors that it reads: name in the text → the tensor and its name in the source.
        numbers: the numbers that have a name in the text: that name → the number and its name in the source.
        functions: the functions of the model that the text calls by their names.
        libraries: the names of libraries in the text: ``torch``, ``F``, ``nn`` or ``math``.
        file: of its source.
    """

    name: str
    text: str
    tensors: Mapping[str, tuple[Tensor, str]]
    numbers: Mapping[str, tuple[float, str]]
    functions: Mapping[str, types.FunctionType]
    libraries: frozenset[str]
    file: str


def function_text(
    function: Callable[..., Any],
    is_of_class: bool = False,
    functions: dict[str, types.FunctionType] | None = None,
) -> FunctionText:
    """Return the text of a function, with the values of the names that it reads from around it.

    Numbers are written as they are, tensors get a name, and arguments that `functools.partial`, a bound method or a
    default give are values as well.

    Args:
        is_of_class: whether the text is for a class of a package: numbers get a name too, unless they are constants of
            the module, and functions of the model are called by their names.
        functions: those that are known, to which others are added.

    Raises:
        NotPortableError: it reads or changes anything else, or its source cannot be found.
    """
    function, values = _with_arguments(function)
    node = copy.deepcopy(_node_of(function.__code__))
    for inner in ast.walk(node):
        if type(inner) in _REFUSED:
            raise NotPortableError(f"it uses {_REFUSED[type(inner)]}")
    closure = inspect.getclosurevars(function)
    around = {**closure.builtins, **closure.globals, **closure.nonlocals, **values}
    parameters = {argument.arg for argument in _parameters(node) if argument.arg not in values}
    stored = {
        inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load)
    }
    nested = {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
    local = (parameters | stored | nested) - values.keys()
    if changed := stored & values.keys():
        raise NotPortableError(f"it changes its argument {min(changed)}")
    if "self" in local:
        raise NotPortableError("it has a variable self, which is the stage in the stage's source")
    reader = _Reader(
        around, local, frozenset(closure.globals) if is_of_class else None, {} if functions is None else functions
    )
    if isinstance(node, ast.Lambda):
        _drop_parameters(node.args, values)
        node.body = reader.visit(node.body)
    else:
        _drop_parameters(node.args, values)
        node.decorator_list, node.returns = [], None
        for argument in _parameters(node):
            argument.annotation = None
        node.body = [reader.visit(statement) for statement in node.body if not _is_docstring(statement)] or [ast.Pass()]
    if hidden := reader.libraries & local:
        raise NotPortableError(f"it has a variable {min(hidden)}, which is a module in the stage's source")
    name = "" if isinstance(node, ast.Lambda) else node.name
    text = ast.unparse(node)
    if '"' not in text:
        text = text.replace("'", '"')
    return FunctionText(
        name,
        text,
        reader.tensors,
        reader.numbers,
        reader.functions,
        frozenset(reader.libraries),
        function.__code__.co_filename,
    )


def _with_arguments(function: Callable[..., Any]) -> tuple[types.FunctionType, dict[str, Any]]:
    """The function that is called in the end, and the arguments that it has already."""
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        positional, named = (*function.args, *positional), {**function.keywords, **named}
        function = function.func
    if isinstance(function, types.MethodType):
        positional, function = (function.__self__, *positional), function.__func__
    function = inspect.unwrap(function)  # of torch.no_grad(), under which autograd calls a hook anyway
    if not isinstance(function, types.FunctionType):
        raise NotPortableError(f"{type(function).__name__} has no source")
    parameters = list(inspect.signature(function).parameters.values())
    defaults = {param.name: param.default for param in parameters if param.default is not inspect.Parameter.empty}
    names = [param.name for param in parameters]
    return function, {**defaults, **named, **dict(zip(names, positional, strict=False))}


def _node_of(code: types.CodeType) -> ast.Lambda | ast.FunctionDef:
    """The function in the tree of its file: the smallest that begins where the code does and has all of its lines."""
    linecache.checkcache(code.co_filename)
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        raise NotPortableError("its source cannot be read") from None
    places = [
        (line, column)
        for line, _, column, _ in code.co_positions()
        if line is not None and column is not None and (line, column) != (code.co_firstlineno, 0)
    ]
    candidates: list[tuple[int, ast.Lambda | ast.FunctionDef]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
            begin, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
            if all(begin <= place <= end for place in places):
                candidates.append((len(ast.unparse(node)), node))
        elif isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                candidates.append((0, node))
    if not candidates:
        raise NotPortableError("its source cannot be found")
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _parameters(node: ast.Lambda | ast.FunctionDef) -> list[ast.arg]:
    arguments = node.args
    if arguments.vararg or arguments.kwarg:
        raise NotPortableError("it takes *args or **kwargs")
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _drop_parameters(arguments: ast.arguments, values: Mapping[str, Any]) -> None:
    """Leave out the parameters whose values are known."""
    for kind in ("posonlyargs", "args", "kwonlyargs"):
        setattr(arguments, kind, [argument for argument in getattr(arguments, kind) if argument.arg not in values])
    arguments.defaults, arguments.kw_defaults = [], []


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _Reader(ast.NodeTransformer):
    """Replaces what a function reads from around it by its value.

    Args:
        around: name → value.
        local: the names that are its own.
        constants: the names whose numbers are written as they are, in the text of a class; None for all.
        functions: the functions of the model that are called by their names; others are added.
    """

    def __init__(
        self,
        around: Mapping[str, Any],
        local: set[str],
        constants: frozenset[str] | None,
        functions: dict[str, types.FunctionType],
    ) -> None:
        self._around, self._local, self._constants, self.functions = around, local, constants, functions
        self.tensors: dict[str, tuple[Tensor, str]] = {}
        self.numbers: dict[str, tuple[float, str]] = {}
        self.libraries: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        chain: list[ast.Attribute] = []
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            chain.insert(0, root)
            root = root.value
        if not isinstance(root, ast.Name) or root.id in self._local:
            return self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            raise NotPortableError(f"it changes {ast.unparse(node)}")
        value, source = self._value(root.id), root.id
        for position, attribute in enumerate(chain):
            written = self._written(value, source)
            if written is not None:
                for remaining_attribute in chain[position:]:
                    written = ast.Attribute(written, remaining_attribute.attr, ast.Load())
                return written
            if isinstance(value, nn.Module) and attribute.attr == "training":
                raise NotPortableError(f"it uses {ast.unparse(node)}, which the mode changes")
            if not hasattr(value, attribute.attr):
                raise NotPortableError(f"it uses {ast.unparse(node)}, which is missing")
            value, source = getattr(value, attribute.attr), attribute.attr
        return self._required(value, source, ast.unparse(node))

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if not isinstance(node.ctx, ast.Load):
            root: ast.expr = node
            while isinstance(root, (ast.Subscript, ast.Attribute)):
                root = root.value
            if isinstance(root, ast.Name) and root.id not in self._local:
                raise NotPortableError(f"it changes {ast.unparse(node)}")
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self._local or not isinstance(node.ctx, ast.Load):
            return node
        return self._required(self._value(node.id), node.id, node.id)

    def _value(self, name: str) -> Any:
        if name in self._around:
            return self._around[name]
        raise NotPortableError(f"it uses {name}, which is not there yet")

    def _required(self, value: Any, name: str, text: str) -> ast.expr:
        written = self._written(value, name)
        if written is None:
            raise NotPortableError(f"it uses {text}, which is {_kind(value)}")
        return written

    def _written(self, value: Any, name: str) -> ast.expr | None:
        """A value as it is written; None if it cannot be."""
        for library, module in _LIBRARIES.items():
            if value is module:
                self.libraries.add(library)
                return ast.Name(library, ast.Load())
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if isinstance(value, (torch.dtype, torch.device)):
            self.libraries.add("torch")
            return ast.parse(str(value) if isinstance(value, torch.dtype) else f"torch.{value!r}", mode="eval").body
        if getattr(builtins, name, None) is value and name in _BUILTINS:
            return ast.Name(name, ast.Load())
        for library, module in _LIBRARIES.items():
            if callable(value) and getattr(module, name, None) is value:
                self.libraries.add(library)
                return ast.Attribute(ast.Name(library, ast.Load()), name, ast.Load())
        if self._constants is not None:
            if name not in self._constants and type(value) in (bool, int, float):
                return _named(self.numbers, "number", value, name)
            if isinstance(value, types.FunctionType) and value.__name__ == name and not value.__code__.co_freevars:
                self._add_function(value)
                return ast.Name(name, ast.Load())
        return _number(value)

    def _add_function(self, function: types.FunctionType) -> None:
        """Add a function, and those that it calls, if they need nothing but torch."""
        name = function.__name__
        namesake = self.functions.get(name)
        if namesake is function:
            return
        if namesake is not None:
            raise NotPortableError(f"it calls two functions of the name {name}")
        self.functions[name] = function
        if function_text(function, True, self.functions).tensors:
            raise NotPortableError(f"it calls {name}, which reads a tensor")

    def _tensor(self, value: Tensor, name: str) -> ast.expr:
        return _named(self.tensors, "tensor", value, name)


def _named(values: dict[str, tuple[Any, str]], kind: str, value: Any, name: str) -> ast.expr:
    """The name of a value in the text: a new one, unless it has one."""
    names = (key for key, (named, source) in values.items() if named is value and (kind == "tensor" or source == name))
    key = next(names, f"_{kind}_{len(values)}")
    values.setdefault(key, (value, name))
    return ast.Name(key, ast.Load())


def _number(value: Any) -> ast.expr | None:
    """A number, a text, None or a tuple of them."""
    if isinstance(value, float) and not math.isfinite(value):
        return ast.parse(f"float('{value}')", mode="eval").body
    if value is None or type(value) in (bool, int, float, str):
        return ast.Constant(value)
    if type(value) is tuple:
        parts = [_number(part) for part in value]
        return ast.Tuple([part for part in parts if part is not None], ast.Load()) if None not in parts else None
    return None


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
