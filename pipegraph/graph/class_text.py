"""Where a class is written, and its text. Each file is parsed once; ``inspect`` parses it for every class."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class ClassText(NamedTuple):
    """The file of a class, its first line, decorators included, and its text."""

    file: Path
    line: int
    text: str


def class_text(cls: type) -> ClassText | None:
    """Return the source of a class; None if there is none, as of a class that is made by a call."""
    try:
        file = inspect.getsourcefile(cls)
    except (OSError, TypeError):
        return None
    if file is None:
        return None
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    found = _classes("".join(lines)).get(cls.__qualname__)
    return None if found is None else ClassText(Path(file), found[0], "".join(lines[found[0] - 1 : found[1]]))


def is_layer_of_torch(cls: type) -> bool:
    """Return whether a class is one of ``torch.nn``'s layers, which follow their mode themselves.

    ``torch.nn.utils.parametrizations`` are not among them: they ask for the mode, as a model does.
    """
    return cls.__module__.startswith("torch.nn.modules.")


@lru_cache(maxsize=64)
def _classes(source: str) -> dict[str, tuple[int, int]]:
    """The first and the last line of each class in a file, by the name that ``__qualname__`` is."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    found: dict[str, tuple[int, int]] = {}
    for name, node in _definitions(tree, ""):
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        found.setdefault(name, (first, node.end_lineno or first))
    return found


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield f"{prefix}{child.name}", child
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _definitions(child, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from _definitions(child, prefix)
