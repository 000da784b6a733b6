"""Expressions of the modules, parameters and buffers of a stage: ``self.layers[0].norm``."""

from __future__ import annotations

from functools import reduce

from pipegraph.codegen.expressions.module_tree import ModuleTree
from pipegraph.codegen.names.identifiers import is_plain
from pipegraph.codegen.syntax.expressions import SELF, Attribute, Expression, method, string


def module_access(tree: ModuleTree, fqn: str) -> Expression:
    """The expression of a module of the stage; ``self.get_submodule("…")`` for an item inside a block."""
    return _plain_access(tree, fqn) or method(SELF, "get_submodule", string(fqn))


def parameter_access(tree: ModuleTree, fqn: str, is_buffer: bool = False) -> Expression:
    """The expression of a parameter or buffer of the stage; ``self.get_parameter("…")`` for one inside a block."""
    owner, _, name = fqn.rpartition(".")
    if is_plain(name) and (module := _plain_access(tree, owner)) is not None:
        return Attribute(module, name)
    return method(SELF, "get_buffer" if is_buffer else "get_parameter", string(fqn))


def _plain_access(tree: ModuleTree, fqn: str) -> Expression | None:
    """The expression of a module as attributes; None for an item inside a block, ``layers.0.heads.1``."""
    path = fqn.split(".") if fqn else []
    inside: list[str] = []
    while path and tree.at(path) is None:
        inside.insert(0, path.pop())
    return reduce(Attribute, inside, tree.access(path)) if all(map(is_plain, inside)) else None
