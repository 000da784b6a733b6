"""What the model calls the values in an ``nn.Sequential``, whose own ``forward`` calls each of them ``input``."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import dropwhile

from torch import nn

from pipegraph.codegen.names.source_statements import SourceStatement

_FILE = nn.Sequential.forward.__code__.co_filename


def named_by_caller(chain: Sequence[SourceStatement]) -> str | None:
    """``x`` of ``x = self.layers(h)`` or ``return self.layers(x)``: for what an ``nn.Sequential`` and its parts make.

    Args:
        chain: the statements that led to a value, outermost first.
    """
    outside = list(dropwhile(lambda statement: statement.file == _FILE, reversed(chain)))
    if len(outside) in (0, len(chain)):
        return None
    match outside[0].tree:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
            pass
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call() as call):
            pass
        case ast.Return(value=ast.Call(args=[ast.Name(id=name), *_]) as call):
            pass
        case _:
            return None
    return name if _is_module(call.func) else None


def _is_module(called: ast.expr) -> bool:
    """Return whether a call may be that of a module: ``self.layers``, or ``stage`` of ``for stage in self.stages``."""
    if isinstance(called, ast.Name):
        return True
    while isinstance(called, (ast.Attribute, ast.Subscript)):
        called = called.value
    return isinstance(called, ast.Name) and called.id == "self"
