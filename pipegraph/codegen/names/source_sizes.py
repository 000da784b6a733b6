"""The sizes of tensors that a function of the model's source reads: ``x.shape[1]``, ``rows, length = x.shape``."""

from __future__ import annotations

import ast


def assigned_sizes(function: ast.AST) -> dict[str, tuple[str, int]]:
    """Return the variables to which a function assigns the size of a tensor → the tensor, and its dimension:
    ``rows, length = x.shape``, ``length = x.size(1)``."""
    sizes: dict[str, tuple[str, int]] = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name) and (dim := dimension_of(node.value)) is not None:
            sizes[target.id] = _owner(node.value), dim
        elif isinstance(target, ast.Tuple) and _is_shape(node.value):
            owner = _owner(node.value)
            sizes |= {part.id: (owner, dim) for dim, part in enumerate(target.elts) if isinstance(part, ast.Name)}
    return sizes


def dimension_of(node: ast.AST) -> int | None:
    """Return 1 for ``x.shape[1]`` and ``x.size(1)``; None for anything else."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="shape"), slice=ast.Constant(value=int(dim))):
            return dim
        case ast.Call(func=ast.Attribute(attr="size"), args=[ast.Constant(value=int(dim))]):
            return dim
    return None


def size_read(node: ast.AST) -> tuple[ast.expr, int] | None:
    """``x`` and −1 of ``x.shape[-1]`` and ``x.size(-1)``, whatever ``x`` is; None for anything else."""
    match node:
        case ast.Subscript(value=ast.Attribute(value=owner, attr="shape"), slice=index):
            pass
        case ast.Call(func=ast.Attribute(value=owner, attr="size"), args=[index]):
            pass
        case _:
            return None
    match index:
        case ast.Constant(value=int(dim)):
            return owner, dim
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(dim))):
            return owner, -dim
    return None


def _is_shape(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(attr="shape") | ast.Call(func=ast.Attribute(attr="size"), args=[]):
            return True
    return False


def _owner(node: ast.expr) -> str:
    """``x`` of ``x.shape``, ``x.shape[1]`` and ``x.size(1)``."""
    names = (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
    return next(names, "")
