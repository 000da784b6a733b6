"""The names that the text of a function reads: what a package has to import, to copy or to set."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, Final

import torch
import torch.nn.functional
from torch import nn

from pipegraph.codegen.author_text.cut import FunctionCut, UnwritableError
from pipegraph.codegen.syntax.expressions import Expression, Name, literal
from pipegraph.codegen.syntax.statements import FunctionSource, SourceText
from pipegraph.graph.captured import ExecutedLines, LineStep

_IMPORTED: Final = (torch, torch.nn.functional, torch.nn, math, typing)
"""Modules whose members a package may import."""
_SELF: Final = "self"
WITH_EFFECTS: Final = frozenset({"breakpoint", "eval", "exec", "globals", "input", "open", "print", "__import__"})
"""Built-in functions that do more than to return a value."""
_NOT_IN_A_STAGE: Final = frozenset({"checkpoint", "compile", "distributed"})
"""Members of torch that a stage does without: what is computed again is decided for the pipeline."""


_Needs = tuple[frozenset[str], tuple[tuple[str, Expression], ...], frozenset[str], str]


@dataclass
class ReadNames:
    """What the text of a class or of a function reads.

    Attributes:
        origin: the file of the class, with its license.
        methods: of the class, by name → their text, with decorators of ``property`` and the like.
        attributes: of the module that are no tensors and no modules → their values.
        children: attributes that are modules.
        functions: of the model's source → their text, each after those that it calls.
        constants: of the model's source → their values.
        imports: the name in the text → the import that it needs.
        needs: of each function, the functions that it calls, the constants that it reads, its imports and its origin.
    """

    origin: str = ""
    methods: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, Expression] = field(default_factory=dict)
    children: set[str] = field(default_factory=set)
    functions: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Expression] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    needs: dict[str, _Needs] = field(default_factory=dict)


def names_of_module(module: nn.Module, fqn: str, lines: ExecutedLines) -> ReadNames:
    """Return the text of the ``forward`` of a module, of the methods that it calls, and what these read.

    Raises:
        UnwritableError: they read something that a package does not have.
    """
    function = inspect.unwrap(type(module).forward)
    if not isinstance(function, FunctionType):
        raise UnwritableError("its forward is not written in Python")
    names = ReadNames(origin_of(function.__code__.co_filename))
    try:
        _SourceReader(names, lines, module, fqn).add_method("forward")
    except (AttributeError, RuntimeError, SyntaxError, TypeError, ValueError) as error:
        # Attributes and properties of a model's objects may raise any of these.
        raise UnwritableError(f"it cannot be read: {error}") from error
    return names


_LICENSES: Final = (
    re.compile(r"SPDX-License-Identifier: *([\w.+-]+)"),
    re.compile(r"[Ll]icensed under the ([A-Z][\w .-]*?[Ll]icense)"),
    re.compile(r"\b((?:MIT|BSD|Apache|ISC)[\w .-]*? [Ll]icense)"),
)
"""How the head of a file names its license."""
_HEAD: Final = 4000  # characters


@functools.cache
def origin_of(file: str) -> str:
    """``modeling_llama.py (Apache License)``: the name of a file, and the license that its head names."""
    path = Path(file)
    try:
        head = path.read_text(encoding="utf-8")[:_HEAD]
    except (OSError, ValueError):
        head = ""
    license_name = next(filter(None, (pattern.search(head) for pattern in _LICENSES)), None)
    return path.name if license_name is None else f"{path.name} ({license_name[1]})"


_STANDARD: Final = {
    "F": "import torch.nn.functional as F",
    "OrderedDict": "from collections import OrderedDict",
    "Tensor": "from torch import Tensor",
    "math": "import math",
    "nn": "from torch import nn",
    "torch": "import torch",
}
"""The imports of classes that are written from the graph, by name."""


class SharedNames:
    """The names that all classes of ``blocks.py`` share. Each means one thing there.

    Args:
        classes: the names of classes, which nothing else has.

    Attributes:
        functions: the functions that texts call, each after those that it calls.
    """

    def __init__(self, classes: set[str]) -> None:
        names = "|".join(map(re.escape, classes))
        self._is_class = re.compile(rf"({names})(Start|Middle|End)?\d*").fullmatch
        self._meanings: dict[str, object] = dict(_STANDARD)
        self.functions: list[FunctionSource] = []

    def text_of(self, names: ReadNames) -> SourceText:
        """Return the text of a class. Raises UnwritableError if one of its names means something else elsewhere."""
        meanings: dict[str, object] = {**names.imports, **names.constants, **names.functions}
        for name, meaning in meanings.items():
            if self._meanings.get(name, meaning) != meaning or self._is_class(name):
                raise UnwritableError(f"{name} means something else in the package")
        new = [name for name in names.functions if name not in self._meanings]
        self._meanings |= meanings
        imports = frozenset(names.imports.values())
        needs = frozenset(names.functions), tuple(names.constants.items()), imports, names.origin
        self.functions += [
            FunctionSource(name, "", (), (SourceText((names.functions[name],), *names.needs[name]),)) for name in new
        ]
        return SourceText(tuple(names.methods.values()), *needs)


class _SourceReader:
    """Reads the names of functions, one after the other."""

    def __init__(self, names: ReadNames, lines: ExecutedLines, module: nn.Module | None, fqn: str) -> None:
        self._names, self._lines, self._module, self._fqn = names, lines, module, fqn

    def add_method(self, name: str) -> None:
        """Add a method of the module's class, and what it reads."""
        if name in self._names.methods:
            return
        member = inspect.getattr_static(type(self._module), name)
        decorator = ""
        function = member
        if isinstance(member, (staticmethod, classmethod)):
            decorator, function = f"@{type(member).__name__}\n", member.__func__
        elif isinstance(member, property):
            decorator, function = "@property\n", member.fget
        if isinstance(member, classmethod) or not isinstance(inspect.unwrap(function), FunctionType):
            raise UnwritableError(f"{name} is not a plain method")
        self._names.methods[name] = ""  # so that a method that calls itself ends
        steps = self._lines.modules.get(self._fqn, frozenset())
        if isinstance(member, staticmethod):
            code = inspect.unwrap(function).__code__
            steps = self._lines.functions.get((code.co_filename, code.co_firstlineno), frozenset())
        self._names.methods[name] = decorator + self._text(function, steps)

    def _add_function(self, function: Callable[..., Any], name: str) -> None:
        """Add a function of the model's source."""
        if name in self._names.functions:
            return
        code = inspect.unwrap(function).__code__
        if code.co_name != name:
            raise UnwritableError(f"{name} is defined under another name")
        steps = self._lines.functions.get((code.co_filename, code.co_firstlineno), frozenset())
        inner = ReadNames(origin_of(code.co_filename), functions=self._names.functions, needs=self._names.needs)
        text = _SourceReader(inner, self._lines, None, "")._text(function, steps)
        self._names.functions[name] = text  # after those that it calls
        self._names.constants |= inner.constants
        self._names.imports |= inner.imports
        calls = frozenset(inner.functions) - {name}
        constants, imports = tuple(inner.constants.items()), frozenset(inner.imports.values())
        self._names.needs[name] = calls, constants, imports, inner.origin

    def _text(self, decorated: Callable[..., Any], steps: frozenset[LineStep]) -> str:
        """The text of a function, cut to what ran, with the names in it resolved."""
        function = inspect.unwrap(decorated)
        code = function.__code__
        if code.co_freevars:
            raise UnwritableError(f"{code.co_name} reads variables of the function around it")
        cut = FunctionCut(code.co_filename, code.co_firstlineno, steps)
        # Those of other libraries are left out: if they compute anything, the comparison with the graph says so.
        decorators = [f"@{decorator}\n" for decorator in cut.decorators if decorator.startswith("torch.")]
        if decorators:
            self._names.imports["torch"] = "import torch"
        return "".join(decorators) + _Text(self, function.__globals__, cut.text).resolved()


class _Text:
    """The text of one function, and where it reads what."""

    def __init__(self, reader: _SourceReader, namespace: Mapping[str, Any], text: str) -> None:
        self._reader, self._names, self._module = reader, reader._names, reader._module
        self._namespace = namespace
        self._text = text
        try:
            self._tree = ast.parse(text).body[0]
        except (SyntaxError, IndexError) as error:
            raise UnwritableError("its text cannot be parsed after it was cut") from error
        self._edits: list[tuple[ast.expr, str]] = []

    def resolved(self) -> str:
        """The text, with numbers in the place of what a package does not have."""
        assert isinstance(self._tree, ast.FunctionDef)
        self._text, self._tree = _with_known_annotations(self._text, self._tree, self._namespace)
        local = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name) and _is_stored(node)}
        local |= {node.arg for node in ast.walk(self._tree) if isinstance(node, ast.arg)}
        local |= {node.name for node in ast.walk(self._tree) if isinstance(node, ast.FunctionDef)}
        owned = {id(node.value) for node in ast.walk(self._tree) if isinstance(node, ast.Attribute)}
        parents = {id(node.value): node for node in ast.walk(self._tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(self._tree):
            check_node(node)
            if isinstance(node, ast.Attribute) and _is_self(node.value) and self._module is not None:
                self._read_attribute(node, parents)
            elif isinstance(node, ast.Name) and not _is_stored(node):
                if node.id == _SELF and self._module is not None and id(node) not in owned:
                    raise UnwritableError("it hands itself on")
                if node.id not in local:
                    self._read_global(node.id)
        return self._edited()

    # ---- attributes --------------------------------------------------------------------------------------------------

    def _read_attribute(self, node: ast.Attribute, parents: Mapping[int, ast.Attribute]) -> None:
        module, name = self._module, node.attr
        assert module is not None
        if not isinstance(node.ctx, ast.Load):
            raise UnwritableError(f"it sets self.{name}")
        if name == "training":
            return
        for registered in (module._modules, module._parameters, module._buffers):
            if name in registered:
                if registered[name] is None:
                    self._names.attributes[name] = literal(None)
                elif registered is module._modules:
                    self._names.children.add(name)
                return
        if name in vars(module):
            self._read_value(node, vars(module)[name], parents)
            return
        try:
            member = inspect.getattr_static(type(module), name)
        except AttributeError:
            raise UnwritableError(f"self.{name} is not there") from None
        if isinstance(member, (FunctionType, staticmethod, classmethod, property)):
            if getattr(nn.Module, name, None) is not None:
                raise UnwritableError(f"it calls self.{name}")
            self._reader.add_method(name)
        else:
            self._read_value(node, member, parents)

    def _read_value(self, node: ast.Attribute, value: Any, parents: Mapping[int, ast.Attribute]) -> None:
        """Read an attribute, or what an object in it has: ``self.config.eps`` is written as ``self.eps``."""
        first, outer = node, node
        while not (_is_plain(value) or _function_name(value)) and id(outer) in parents:
            outer = parents[id(outer)]
            value = getattr(value, outer.attr, _MISSING)
        if isinstance(value, torch.Tensor):
            if outer is not first:
                raise UnwritableError(f"it reads a tensor of self.{first.attr}")
            return
        written = Name(_function_name(value)) if _function_name(value) else plain_expression(value)
        if written is None:
            raise UnwritableError(f"self.{first.attr} is a {type(value).__name__}")
        name = outer.attr
        if outer is not first:
            is_taken = name in vars(self._module) and plain_expression(vars(self._module)[name]) != written
            if is_taken or name in self._registered():
                name = f"{first.attr}_{name}"
            self._edits.append((outer, f"self.{name}"))
        if self._names.attributes.setdefault(name, written) != written:
            raise UnwritableError(f"self.{name} would be two things")

    def _registered(self) -> set[str]:
        assert self._module is not None
        return {*self._module._modules, *self._module._parameters, *self._module._buffers}

    # ---- global names ------------------------------------------------------------------------------------------------

    def _read_global(self, name: str) -> None:
        if name not in self._namespace:
            if not hasattr(builtins, name) or name in WITH_EFFECTS:
                raise UnwritableError(f"it uses {name}")
            return
        value = self._namespace[name]
        imported = import_of(name, value)
        if imported is not None:
            self._names.imports[name] = imported
        elif isinstance(value, FunctionType) and not value.__module__.startswith("torch."):
            self._reader._add_function(value, name)
        elif (constant := plain_expression(value)) is not None:
            self._names.constants[name] = constant
        else:
            raise UnwritableError(f"{name} is a {type(value).__name__}, which no package can import")

    def _edited(self) -> str:
        lines = self._text.splitlines()
        for node, text in sorted(self._edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset), reverse=True):
            if node.lineno != node.end_lineno:
                raise UnwritableError("an attribute stands on two lines")
            line = lines[node.lineno - 1].encode()  # columns are bytes of UTF-8
            lines[node.lineno - 1] = (line[: node.col_offset] + text.encode() + line[node.end_col_offset :]).decode()
        return "\n".join(lines)


_MISSING: Final = object()


def import_of(name: str, value: Any) -> str | None:
    """The import by which a package has a value of torch, math or typing under a name; None without one."""
    if isinstance(value, ModuleType):
        if value.__name__.partition(".")[0] not in ("torch", "math"):
            return None
        if value is nn and name == "nn":
            return "from torch import nn"
        return f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")
    own_name = getattr(value, "__name__", None) or getattr(value, "_name", None) or name
    for module in _IMPORTED:
        for candidate in dict.fromkeys((own_name, name)):
            if isinstance(candidate, str) and module.__dict__.get(candidate, _MISSING) is value:
                return f"from {module.__name__} import {candidate}" + ("" if candidate == name else f" as {name}")
    return None


def plain_expression(value: Any) -> Expression | None:
    """A plain value as it is written; None for anything else."""
    if not _is_plain(value):
        return None
    try:
        return literal(tuple(value) if isinstance(value, torch.Size) else value)
    except TypeError:
        return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return type(value) in (tuple, list, torch.Size) and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.dtype)


@functools.cache
def _functions_of_torch() -> Mapping[Any, str]:
    pairs = (
        (value, f"{prefix}.{name}")
        for prefix, module in (("F", torch.nn.functional), ("torch", torch))
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and not isinstance(value, type)
    )
    names: dict[Any, str] = {}
    for value, name in pairs:
        try:
            names.setdefault(value, name)
        except TypeError:  # without a hash
            continue
    return MappingProxyType(names)


def _function_name(value: Any) -> str:
    """``F.gelu`` for a function of torch that a module has as an attribute."""
    if not callable(value) or isinstance(value, (type, nn.Module)):
        return ""
    try:
        return _functions_of_torch().get(value, "")
    except TypeError:
        return ""


_RESHAPES: Final = frozenset({"view", "reshape", "unflatten", "expand", "repeat", "split", "split_with_sizes"})
"""Methods that take sizes."""


def divides_features(module: nn.Module, names: ReadNames) -> bool:
    """Return whether the text of a class has numbers of features in its code, such as ``x.view(b, t, self.heads, -1)``.

    Ranks along `tp` have some of the features of a linear layer, and of the heads. Statements that are written from the
    graph name the sizes that no rank divides.
    """
    has_layers = any(isinstance(child, nn.Linear) for child in module.children())
    return has_layers and any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _RESHAPES
        and _names_features(node.args)
        for text in (*names.methods.values(), *names.functions.values())
        for node in ast.walk(ast.parse(text))
    )


def _names_features(sizes: Sequence[ast.expr]) -> bool:
    """Return whether sizes leave no dimension open, or name a number other than a size of a tensor."""
    is_open = any(isinstance(size, ast.UnaryOp) for size in sizes)
    return any(map(_is_number_of_features, sizes)) or (len(sizes) > 1 and not is_open)


def _is_number_of_features(argument: ast.expr) -> bool:
    """Return whether an argument is more than 1, and not a size of a tensor: ``self.heads``, ``3 * width``."""
    match argument:
        case ast.Constant(value=int(value)):
            return value > 1
        case ast.UnaryOp():
            return False
        case ast.Name() | ast.Subscript() | ast.Starred():
            return False  # rows, x.shape[1], *x.shape[:-1]
    return True


def check_node(node: ast.AST) -> None:
    """Raise UnwritableError for what no stage has."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Yield, ast.Await)):
        raise UnwritableError("it imports a module, or is not a plain function")
    if isinstance(node, ast.Attribute) and node.attr in _NOT_IN_A_STAGE and ast.unparse(node).startswith("torch."):
        raise UnwritableError(f"it uses {ast.unparse(node)}, which is an option of the pipeline")


# ---- annotations -----------------------------------------------------------------------------------------------------


def _with_known_annotations(text: str, tree: ast.stmt, namespace: Mapping[str, Any]) -> tuple[str, ast.stmt]:
    """A function without the annotations whose names a package does not have."""
    assert isinstance(tree, ast.FunctionDef)
    unknown = [holder for holder, annotation in _annotations(tree) if not _is_known(annotation, namespace)]
    if not unknown:
        return text, tree
    for holder in unknown:
        if isinstance(holder, ast.FunctionDef):
            holder.returns = None
        else:
            holder.annotation = None
    first = tree.body[0]
    lines = text.splitlines()
    end = next(line for line in range(first.lineno - 1, 0, -1) if lines[line - 1].split("#")[0].rstrip().endswith(":"))
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns is not None else ""
    header = f"def {tree.name}({ast.unparse(tree.args)}){returns}:"
    changed = "\n".join([*_wrapped(header, tree), *lines[end:]])
    return changed, ast.parse(changed).body[0]


def _wrapped(header: str, tree: ast.FunctionDef) -> list[str]:
    """A header on one line, or with the parameters on lines of their own."""
    if len(header) <= 110:
        return [header]
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns is not None else ""
    return [f"def {tree.name}(", f"    {ast.unparse(tree.args)}", f"){returns}:"]


def _annotations(tree: ast.FunctionDef) -> Iterator[tuple[Any, ast.expr]]:
    if tree.returns is not None:
        yield tree, tree.returns
    for node in ast.walk(tree.args):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node, node.annotation


def _is_known(annotation: ast.expr, namespace: Mapping[str, Any]) -> bool:
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return False
        if isinstance(node, ast.Name):
            if node.id in namespace:
                if import_of(node.id, namespace[node.id]) is None:
                    return False
            elif not hasattr(builtins, node.id):
                return False
    return True


def _is_stored(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == _SELF
