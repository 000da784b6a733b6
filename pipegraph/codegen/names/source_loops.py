"""The loops of the model's source: their lines, and the names that they give to indices, elements and lists."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache

from pipegraph.codegen.names.source_statements import source_tree


@dataclass(frozen=True)
class SourceLoop:
    """A ``for`` or ``while`` of the model's source, or a comprehension.

    Attributes:
        file, line: its place.
        index, element: the names of its variables: of a number, as in ``for t in range(…)``, and of an element, as in
            ``for expert in self.experts``; "" if it has none.
        lists: the names of the lists to which it appends, in the order of the source; of a comprehension, the variable
            that it is assigned to.
        iterable: what it goes over; None for a ``while``.
    """

    file: str
    line: int
    index: str = ""
    element: str = ""
    lists: tuple[str, ...] = ()
    iterable: ast.expr | None = field(default=None, compare=False, repr=False)


def loops_at(file: str, line: int) -> tuple[SourceLoop, ...]:
    """The loops whose body a line is in, outermost first; none if the file cannot be read."""
    return _loops(file, source_tree(file)).get(line, ())


@cache
def _loops(file: str, tree: ast.Module) -> dict[int, tuple[SourceLoop, ...]]:
    loops_by_line: dict[int, tuple[SourceLoop, ...]] = {}
    waiting: list[tuple[ast.AST, tuple[SourceLoop, ...]]] = [(tree, ())]
    assigned: dict[ast.AST, str] = {}  # comprehension → the variable that it is assigned to
    while waiting:
        node, around = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            around = ()
        body: list[ast.AST] = []
        inside = around
        if isinstance(node, ast.Assign) and isinstance(node.targets[-1], ast.Name):
            assigned[node.value] = node.targets[-1].id
        if isinstance(node, (ast.For, ast.While)):
            body += node.body
            target, iterable = (node.target, node.iter) if isinstance(node, ast.For) else (None, None)
            inside = (*around, _loop(file, node.lineno, target, iterable, _appended(node.body)))
        elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            body.append(node.elt)
            first, lists = node.generators[0], (assigned[node],) if node in assigned else ()
            inside = (*around, _loop(file, node.lineno, first.target, first.iter, lists))
        for part in body:
            assert isinstance(part, (ast.stmt, ast.expr))
            loops_by_line |= dict.fromkeys(range(part.lineno, (part.end_lineno or part.lineno) + 1), inside)
        waiting += [(child, inside if child in body else around) for child in ast.iter_child_nodes(node)]
    return loops_by_line


def _loop(
    file: str, line: int, target: ast.expr | None, iterable: ast.expr | None, lists: tuple[str, ...]
) -> SourceLoop:
    names = [variable.id if isinstance(variable, ast.Name) else "" for variable in _parts(target)]
    called = iterable.func.id if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name) else ""
    inner = iterable.args[0] if called == "reversed" and isinstance(iterable, ast.Call) and iterable.args else iterable
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name):
        called = inner.func.id
    if called == "range" and len(names) == 1:
        index, element = names[0], ""
    elif called == "enumerate" and len(names) == 2:
        index, element = names
    else:
        index, element = "", names[0] if names else ""
    return SourceLoop(file, line, index.strip("_"), element.strip("_"), lists, iterable)


def _parts(target: ast.expr | None) -> list[ast.expr]:
    if target is None:
        return []
    return target.elts if isinstance(target, ast.Tuple) else [target]


def _appended(body: list[ast.stmt]) -> tuple[str, ...]:
    """``outputs`` of ``outputs.append(h)``."""
    calls = (node for part in body for node in ast.walk(part) if isinstance(node, ast.Call))
    functions = (call.func for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "append")
    names = (function.value.id for function in functions if isinstance(function.value, ast.Name))
    return tuple(dict.fromkeys(names))
