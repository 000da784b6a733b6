"""The names that a statement of the model's source assigns to, or writes into."""

from __future__ import annotations

import ast


def assigned_names(node: ast.stmt) -> tuple[str, ...]:
    """The names that a statement assigns to, or writes into; none if some target is no name."""
    if isinstance(node, ast.Assign):
        target = node.targets[-1]
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        target = node.target
    elif isinstance(node, ast.Expr) and (written := _written(node.value)) is not None:
        target = written
    else:
        return ()
    while isinstance(target, ast.Subscript):  # x[0] = … makes x
        target = target.value
    parts = _parts(target)
    names = tuple(part.id for part in parts if isinstance(part, ast.Name))
    return names if len(names) == len(parts) else ()


def _written(value: ast.expr) -> ast.expr | None:
    """``x`` of ``x.mul_(2).add_(y)``."""
    target: ast.expr | None = None
    part = value
    while isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
        is_in_place = part.func.attr.endswith("_") and not part.func.attr.endswith("__")
        target = part.func.value if is_in_place else None
        part = part.func.value
    return target


def _parts(target: ast.expr) -> list[ast.expr]:
    """``a``, ``b`` and ``c`` of ``a, (b, c) = …``."""
    return [part for element in target.elts for part in _parts(element)] if isinstance(target, ast.Tuple) else [target]
