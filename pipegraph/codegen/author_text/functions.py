"""The text of a model's ``torch.autograd.Function``s, with all that it reads: a package has their backward too.

Unlike the text of a module it is not cut to what ran: a capture runs no backward.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch

from pipegraph.codegen.author_text.cut import UnwritableError
from pipegraph.codegen.author_text.names import (
    WITH_EFFECTS,
    ReadNames,
    SharedNames,
    check_node,
    import_of,
    origin_of,
    plain_expression,
)
from pipegraph.codegen.names.source_statements import source_tree
from pipegraph.errors import CaptureError, path_from_here
from pipegraph.graph.tensor_hooks import file_of_hook


def add_function(shared: SharedNames, function: type) -> None:
    """Let a package have the class of a Function, and the functions and classes that it reads.

    Raises:
        CaptureError: it reads something that a package does not have.
    """
    names = ReadNames()
    try:
        _add(names, {}, function)
        shared.text_of(names, (), ())
    except UnwritableError as error:
        raise CaptureError(
            f"{function.__qualname__} cannot be written into a package: {error}.{_place(function)}",
            "a torch.autograd.Function that reads torch, math, numbers and plain functions alone, under names that "
            "nothing else in the model has; or torch.library.custom_op with register_autograd, in a module that is "
            "installed.",
        ) from error


def _place(function: type) -> str:
    """The line of its class, for a message; empty if that cannot be found."""
    try:
        file, statement = _statement(function)
    except UnwritableError:
        return ""
    return f"\n  at {path_from_here(file)}:{statement.lineno}"


def _add(names: ReadNames, meanings: dict[str, object], member: type | FunctionType) -> None:
    """Add the text of a class or a function after the texts that it reads.

    Args:
        meanings: name → what it is in all texts: an import, a value, a function or a class.

    Raises:
        UnwritableError: a package does not have something that it reads.
    """
    name = member.__name__
    if name in names.functions:
        return
    names.functions[name] = ""  # so that a function that calls itself ends
    text = _Definition(member)
    reads = ReadNames()
    calls = set()
    for read in sorted(text.names_read()):
        value = text.namespace.get(read, _MISSING)
        if value is _MISSING and read != name:  # the class of a function that is running has no name there
            if not hasattr(builtins, read) or read in WITH_EFFECTS:
                raise UnwritableError(f"{name} uses {read}")
            continue
        meaning: Any = member if read == name else value
        if (imported := _import_of(read, meaning)) is not None:
            meaning = reads.imports[read] = imported
        elif _has_text(meaning):
            if meaning.__name__ != read:
                raise UnwritableError(f"{read} is defined under another name")
            calls.add(read)
        elif (constant := plain_expression(meaning)) is not None:
            meaning = reads.constants[read] = constant
        else:
            raise UnwritableError(f"{name} reads {read}, a {type(value).__name__}, which no package can import")
        if meanings.setdefault(read, meaning) != meaning:
            raise UnwritableError(f"{read} is two things in what it reads")
        if _has_text(meaning):
            _add(names, meanings, meaning)
    del names.functions[name]
    names.functions[name] = text.text
    names.imports |= reads.imports
    names.constants |= reads.constants
    constants, imports = tuple(reads.constants.items()), frozenset(reads.imports.values())
    names.needs[name] = frozenset(calls - {name}), constants, imports, text.origin


_MISSING = object()


def _has_text(value: Any) -> bool:
    """Return whether a package may have the text of a value: of a function, or of an autograd Function."""
    is_class = isinstance(value, type) and issubclass(value, torch.autograd.Function)
    return is_class or isinstance(value, FunctionType)


def _import_of(name: str, value: Any) -> str | None:
    """The import of a value of torch, such as ``once_differentiable``; None without one."""
    imported = import_of(name, value)
    module, member = getattr(value, "__module__", None) or "", getattr(value, "__name__", "")
    of_torch = module.split(".")[0] == "torch" and getattr(sys.modules.get(module), member, None) is value
    if imported is None and of_torch:
        imported = f"from {module} import {member}" + ("" if member == name else f" as {name}")
    if imported is not None and "distributed" in imported:
        raise UnwritableError(f"it uses {name} of torch.distributed")
    return imported


class _Definition:
    """The class or the function as its file has it, without docstrings, and annotations that a package does not have.

    Attributes:
        text: at an indentation of 0.
        namespace: the values of the names that it may read.
        origin: the file that it is from, with its license.
    """

    def __init__(self, member: type | FunctionType) -> None:
        file, statement = _statement(member)
        self.origin = origin_of(file_of_hook(member) or file)
        self.namespace = dict(_namespace(member))
        lines = linecache.getlines(file)[_first_line(statement) - 1 : statement.end_lineno]
        text = textwrap.dedent("".join(lines))
        tree = ast.parse(text).body[0]
        for node in ast.walk(tree):
            check_node(node)
        self._lines = text.splitlines()
        for start, end, replacement in sorted(self._edits(tree, member), reverse=True):
            self._replace(start, end, replacement)
        self.text = "\n".join(line.rstrip() for line in self._lines if line is not None).rstrip()
        if not all(line.isprintable() for line in self.text.splitlines()):
            raise UnwritableError("it has characters that cannot be printed")

    def names_read(self) -> set[str]:
        """The names from around it that it reads."""

        def read(table: symtable.SymbolTable, is_outermost: bool) -> Iterator[str]:
            for symbol in table.get_symbols():
                if symbol.is_referenced() and (not symbol.is_assigned() if is_outermost else symbol.is_global()):
                    yield symbol.get_name()
            for child in table.get_children():
                yield from read(child, False)

        return set(read(symtable.symtable(self.text, "text", "exec"), True))

    def _edits(self, tree: ast.stmt, member: type | FunctionType) -> Iterator[tuple[_Place, _Place, str]]:
        """The parts that are left out or replaced: the places of the beginning and the end, and the text instead."""
        for node in ast.walk(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and len(node.body) > 1 and ast.get_docstring(node):
                yield (node.body[0].lineno, -1), (_first_line(node.body[1]), -1), ""
            if isinstance(node, ast.arg) and node.annotation is not None and not self._is_known(node.annotation):
                yield (node.lineno, node.col_offset + len(node.arg.encode())), _end(node.annotation), ""
            if isinstance(node, ast.FunctionDef) and node.returns is not None and not self._is_known(node.returns):
                yield self._arrow(node.returns), _end(node.returns), ""
        for node in tree.body if isinstance(tree, ast.ClassDef) else ():
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                yield from self._attribute(node, node.value, member)

    def _attribute(
        self, node: ast.Assign | ast.AnnAssign, value: ast.expr, member: type | FunctionType
    ) -> Iterator[tuple[_Place, _Place, str]]:
        """The value that an attribute of a class has now, if the class statement says another one."""
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        current = vars(member).get(target.id, _MISSING) if isinstance(target, ast.Name) else _MISSING
        written = None if current is _MISSING else plain_expression(current)
        if written is None:
            raise UnwritableError(f"{ast.unparse(target)} of its class is not a plain value")
        if ast.unparse(value) != ast.unparse(ast.parse(written.text)):
            yield (value.lineno, value.col_offset), _end(value), written.text

    def _is_known(self, annotation: ast.expr) -> bool:
        """Return whether a package has all names of an annotation."""
        for node in ast.walk(annotation):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                return False
            if isinstance(node, ast.Name):
                value = self.namespace.get(node.id, _MISSING)
                if value is _MISSING and not hasattr(builtins, node.id):
                    return False
                if value is not _MISSING and _import_of(node.id, value) is None:
                    return False
        return True

    def _arrow(self, returns: ast.expr) -> _Place:
        """The place of the ``->`` before an annotation, with the spaces before it."""
        line = self._lines[returns.lineno - 1].encode()[: returns.col_offset].decode()
        if "->" not in line:
            raise UnwritableError("an annotation stands on a separate line")
        return returns.lineno, len(line[: line.rindex("->")].rstrip().encode())

    def _replace(self, start: _Place, end: _Place, replacement: str) -> None:
        """Replace the text between two places; with a column of -1 these are whole lines, without the last one."""
        first, last = start[0] - 1, end[0] - 1
        if start[1] < 0:
            del self._lines[first:last]
            return
        head, tail = self._lines[first].encode()[: start[1]], self._lines[last].encode()[end[1] :]
        self._lines[first : last + 1] = [head.decode() + replacement + tail.decode()]


_Place = tuple[int, int]
"""A line, from 1, and a column, in bytes."""


def _end(node: ast.expr) -> _Place:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def _first_line(node: ast.stmt) -> int:
    """The first line of a statement, its decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def _functions(member: type | FunctionType) -> list[FunctionType]:
    """The functions of a class that it does not inherit; a function itself."""
    parts = vars(member).values() if isinstance(member, type) else [member]
    functions = (inspect.unwrap(getattr(part, "__func__", part)) for part in parts)
    return [
        function
        for function in functions
        if isinstance(function, FunctionType) and function.__module__ == member.__module__
    ]


def _statement(member: type | FunctionType) -> tuple[str, ast.stmt]:
    """The file of a class or a function, and its statement there: the smallest that has its code.

    Raises:
        UnwritableError: no class or function of the file has its name.
    """
    code = next((function.__code__ for function in _functions(member)), None)
    kind = ast.ClassDef if isinstance(member, type) else ast.FunctionDef
    if code is None:
        raise UnwritableError(f"{member.__name__} has no functions")
    around = [
        node
        for node in ast.walk(source_tree(code.co_filename))
        if isinstance(node, kind) and _first_line(node) <= code.co_firstlineno <= (node.end_lineno or 0)
    ]
    statement = max(around, key=lambda node: node.lineno, default=None)
    if statement is None or statement.name != member.__name__:
        raise UnwritableError(f"{member.__name__} is defined under another name, or its source cannot be found")
    return code.co_filename, statement


def _namespace(member: type | FunctionType) -> Mapping[str, Any]:
    """The names that the functions of a class, or a function, may read, with their values."""
    values: dict[str, Any] = {}
    for function in _functions(member):
        values |= function.__globals__
        values |= inspect.getclosurevars(function).nonlocals
    return values
