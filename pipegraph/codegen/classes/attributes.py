"""The statements of ``__init__``: modules, parameters and buffers under the model's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from pipegraph.codegen.forward.index_tests import told_apart
from pipegraph.codegen.forward.module_tree import Tree
from pipegraph.codegen.names.identifiers import is_number, is_plain, literal_text
from pipegraph.codegen.syntax.literals import literal
from pipegraph.graph.captured import StateEntry

# A row of modules with two constructors is listed up to this length.
_LISTED = 4


def assignments(tree: Tree, owner: str = "self") -> Iterator[str]:
    """The statements of ``__init__`` that make the attributes, in the model's order."""
    for name, entry in tree.state.items():
        yield _state(owner, name, entry)
    for name, child in tree.children.items():
        if tree.container is nn.Module:
            yield _module(owner, name, _holder(child) if isinstance(child, Tree) else child)
        if isinstance(child, Tree):
            yield from assignments(child, tree.item(owner, name))


def _module(owner: str, name: str, constructor: str) -> str:
    if is_plain(name):
        return f"{owner}.{name} = {constructor}"
    return f"{owner}.add_module({literal_text(name)}, {constructor})"


def _holder(tree: Tree) -> str:
    """The constructor of a holder; a container is made with its children."""
    if tree.container is nn.Module:
        return "nn.Module()"
    kind = f"nn.{tree.container.__name__}"
    items = {name: _holder(child) if isinstance(child, Tree) else child for name, child in tree.children.items()}
    each = _each([int(name) for name in items if is_number(name)], list(items.values()))
    if tree.is_indexed:
        name = "_" if len(set(items.values())) == 1 else "i"
        row = f"[{each} for {name} in range({len(items)})]" if each else f"[{', '.join(items.values())}]"
        if tree.container is nn.ModuleList:
            return f"{kind}({row})"
        return f"{kind}(*{row})" if each else f"{kind}({row[1:-1]})"
    if each:
        start, *_, end = map(int, items)
        return f"{kind}({{str(i): {each} for i in range({f'{start}, ' if start else ''}{end + 1})}})"
    inside = ", ".join(f"{literal_text(name)}: {constructor}" for name, constructor in items.items())
    return f"{kind}({{{inside}}})"


def _each(numbers: Sequence[int], constructors: Sequence[str]) -> str | None:
    """The one constructor of a row of modules, or of a long row the two that a test of ``i`` tells apart; None where
    they are not numbered in a row or more than that."""
    if len(numbers) != len(constructors) or len(numbers) < 2 or numbers != list(range(numbers[0], numbers[-1] + 1)):
        return None
    if len(set(constructors)) == 1:
        return constructors[0]
    test = told_apart(numbers, constructors) if len(constructors) > _LISTED else None
    if test is None:
        return None
    other = next(each for each in constructors if each != test[1])
    return f"{test[1]} if {test[0].format('i')} else {other}"


def _state(owner: str, name: str, entry: StateEntry) -> str:
    sizes = ", ".join(map(str, entry.shape)) if entry.shape else "()"
    dtype = "" if entry.dtype == torch.float32 else f", dtype={literal(entry.dtype)}"
    tensor = f"torch.empty({sizes}{dtype})"
    if entry.kind == "parameter":
        differentiable = entry.dtype.is_floating_point or entry.dtype.is_complex
        parameter = f"nn.Parameter({tensor})" if differentiable else f"nn.Parameter({tensor}, requires_grad=False)"
        if is_plain(name):
            return f"{owner}.{name} = {parameter}"
        return f"{owner}.register_parameter({literal_text(name)}, {parameter})"
    persistent = "" if entry.persistent else ", persistent=False"
    return f"{owner}.register_buffer({literal_text(name)}, {tensor}{persistent})"
