"""The text of a loop over modules: its header, and what a turn calls."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pipegraph.codegen.forward.items import Alternate, Loop
from pipegraph.codegen.forward.module_tree import Tree, access


def heading(loop: Loop, tree: Tree, container: Sequence[str], module: str, number: str) -> tuple[str, str]:
    """The header of a loop, and what it calls in every turn.

    Args:
        container: the path of what holds the modules.
        module, number: what a module and its number are called in the loop.
    """
    holder, owner = tree.at(container), access(tree, container)
    assert isinstance(holder, Tree)
    numbers = [call.fqn.rpartition(".")[2] for call in loop.calls]
    everything, counted = list(holder.children) == numbers, loop.alternate is not None
    span = f"range({f'{numbers[0]}, ' if numbers[0] != '0' else ''}{int(numbers[-1]) + 1})"
    if holder.is_indexed and counted:
        header = f"for {number}, {module} in enumerate({owner}):" if everything else f"for {number} in {span}:"
        return header, module if everything else f"{owner}[{number}]"
    if holder.is_indexed:
        first = "" if numbers[0] == "0" else numbers[0]
        last = "" if numbers[-1] == list(holder.children)[-1] else str(int(numbers[-1]) + 1)
        return f"for {module} in {owner}{'' if everything else f'[{first}:{last}]'}:", module
    is_dict = holder.container is nn.ModuleDict
    if everything and not counted:
        return f"for {module} in {owner}.{'values' if is_dict else 'children'}():", module
    return f"for {number} in {span}:", f"{owner}[str({number})]" if is_dict else f"getattr({owner}, str({number}))"


def turn_lines(
    alternate: Alternate | None, number: str, calling: str, first: Sequence[str], other: Sequence[str] = ()
) -> list[str]:
    """The lines of a turn, ``calling(first)`` or, where there is an ``alternate``, that or ``calling(other)``: one line
    where they differ in one argument, ``calling(x, a if i % 2 else b)``."""
    if alternate is None:
        return [f"{calling}({', '.join(first)})"]
    test = alternate.test.format(number)
    if not alternate.holds_first:
        first, other = other, first
    if differ_in_one(first, other):
        parts = [one if one == two else f"{one} if {test} else {two}" for one, two in zip(first, other, strict=True)]
        return [f"{calling}({', '.join(parts)})"]
    return [f"if {test}:", f"    {calling}({', '.join(first)})", "else:", f"    {calling}({', '.join(other)})"]


def differ_in_one(first: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two calls take the same but for one argument."""
    return len(first) == len(other) and sum(one != two for one, two in zip(first, other, strict=True)) == 1
