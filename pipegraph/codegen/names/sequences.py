"""What the model calls the values in an ``nn.Sequential``, whose own ``forward`` calls each of them ``input``."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import dropwhile

from torch import nn

from pipegraph.codegen.names.source_statements import SourceStatement

_FILE = nn.Sequential.forward.__code__.co_filename


def named_by_caller(chain: Sequence[SourceStatement]) -> str | None:
    """``x`` of ``x = self.layers(x)``, for what an ``nn.Sequential`` and the modules in it make.

    Args:
        chain: the statements that led to a value, outermost first.
    """
    outside = list(dropwhile(lambda each: each.file == _FILE, reversed(chain)))
    if len(outside) in (0, len(chain)) or len(outside[0].targets) != 1:
        return None
    made = outside[0].tree.value if isinstance(outside[0].tree, ast.Assign) else None
    called = made.func if isinstance(made, ast.Call) else None
    is_variable = isinstance(called, ast.Name)  # ``for stage in self.stages: x = stage(x)``
    while isinstance(called, (ast.Attribute, ast.Subscript)):
        called = called.value
    is_own = isinstance(called, ast.Name) and called.id == "self"
    return outside[0].targets[0] if is_variable or is_own else None
