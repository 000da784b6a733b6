"""Tables of layers and functions, such as the activations of a library, as constants of a package."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from types import FunctionType
from typing import Any

from torch import nn

from pipegraph.codegen.author_text.names import function_name
from pipegraph.codegen.expressions.torch_modules import module_constructor
from pipegraph.codegen.syntax.expressions import Collection, Expression, Name, Template, literal


def table_expression(value: object, texts: AbstractSet[str]) -> Expression | None:
    """``{"silu": F.silu}``: the entries of a table for the texts that modules of a model hold.

    None if the value is not a table, or has no entry that is a layer or a function of torch.

    Args:
        texts: the keys that may be read.
    """
    if not isinstance(value, Mapping):
        return None
    written = {key: _written_entry(value[key]) for key in sorted(texts) if key in value}
    entries = [Template("{}: {}", (literal(key), entry)) for key, entry in written.items() if entry is not None]
    return Collection(tuple(entries), "{}") if entries else None


def _written_entry(entry: Any) -> Expression | None:
    """A layer or a function of torch as it is written, also if a layer of a library does nothing but call it."""
    if isinstance(entry, nn.Module):
        return module_constructor(entry) or _called_function(entry)
    return Name(name) if (name := function_name(entry)) else None


def _called_function(module: nn.Module) -> Expression | None:
    """``F.silu`` for a module without tensors whose ``forward`` is ``return nn.functional.silu(input)``."""
    function = inspect.unwrap(type(module).forward)
    if any(True for _ in (*module.children(), *module.parameters(), *module.buffers())):
        return None
    if not isinstance(function, FunctionType):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):
        return None
    match tree:
        case ast.FunctionDef(
            args=ast.arguments(args=[_, ast.arg(parameter)]),
            body=[ast.Return(ast.Call(called, [ast.Name(argument)], []))],
        ) if parameter == argument:
            value: Any = function.__globals__
            first, *attributes = ast.unparse(called).split(".")
            value = value.get(first)
            for attribute in attributes:
                value = getattr(value, attribute, None)
            return Name(name) if (name := function_name(value)) else None
    return None
