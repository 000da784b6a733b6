"""The files of the model's source, parsed once while they stay as they are."""

from __future__ import annotations

import ast
import linecache

_EMPTY = ast.Module(body=[], type_ignores=[])
_trees: dict[str, tuple[list[str], ast.Module]] = {}


def source_tree(file: str) -> ast.Module:
    """Return the tree of a file, or of a cell of a notebook; an empty one if it cannot be read.

    A process may change a file and import it again: it is looked at each time whether it changed.
    """
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    if not lines:
        return _EMPTY
    parsed, tree = _trees.get(file, (None, _EMPTY))
    if parsed is not lines:  # linecache returns the same list until the file changes
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            tree = _EMPTY
        _trees[file] = lines, tree
    return tree
