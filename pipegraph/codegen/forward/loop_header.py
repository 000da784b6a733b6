"""The first line of a loop: ``for t in range(x.shape[1])``, ``for i, expert in enumerate(self.experts)``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from pipegraph.codegen.expressions.module_tree import ModuleTree
from pipegraph.codegen.forward.items import StatementLoop
from pipegraph.codegen.forward.local_variables import Lists, LocalVariables
from pipegraph.codegen.names.identifiers import unused, variable
from pipegraph.codegen.names.source_loops import SourceLoop
from pipegraph.codegen.syntax.expressions import (
    Attribute,
    Expression,
    Name,
    Node,
    Slice,
    Subscript,
    call,
    literal,
    method,
)
from pipegraph.codegen.syntax.loop_index import Progression, progressions, with_variable
from pipegraph.codegen.syntax.statements import For, Statement
from pipegraph.graph.nodes import shape_of

Part = TypeVar("Part", bound=Node)


class LoopHeaders:
    """Writes the headers of the loops of one ``forward``.

    Args:
        values: the variables of the ``forward``.
        lists: its lists.
        tree: the modules of the class.
        number: returns the number of iterations of a loop as the source writes it; None if that has no attribute.
    """

    def __init__(
        self,
        values: LocalVariables,
        lists: Lists,
        tree: ModuleTree,
        number: Callable[[SourceLoop, int], Expression | None],
    ) -> None:
        self._values = values
        self._lists = lists
        self._tree = tree
        self._number = number

    def statement(self, item: StatementLoop, body: tuple[Statement, ...]) -> For:
        """The loop, with the statements of its second iteration as ``body``."""
        count, all_progressions = len(item.iterations), list(progressions(body))
        # Also of values that nothing reads any more: their sizes may be asked for.
        used_names = self._values.used_names().union(self._values.variables, *(_names(statement) for statement in body))
        steps = [progression for progression in all_progressions if abs(progression.difference) == 1]
        start, step = (steps[0].first, steps[0].difference) if steps else (0, 1)
        index = Name(unused(variable(item.source.index or "i", "i"), used_names))
        parts = self._elements(body, Progression(start, step), start + count) if step == 1 else {}
        alone = sum(part in parts for statement in body for part in statement.walk()) == len(all_progressions)
        if parts and (alone or start == 0):
            chosen = dict(list(parts.items())[: None if alone else 1])
            names: list[Name] = []
            for part in chosen:
                base_name = self._element(item, part.owner, len(chosen))
                names.append(Name(unused(base_name, {*used_names, index.name, *(name.name for name in names)})))
            body = tuple(_replaced(statement, dict(zip(chosen, names, strict=True))) for statement in body)
            first, *other_iterables = chosen.values()
            iterable = call("zip", first, *other_iterables, strict=literal(True)) if other_iterables else first
            if not alone:
                iterable, names = call("enumerate", iterable), [index, *names]
            variables = tuple(name.name for name in names)
        else:
            iterable = self._range(item, body, start, step)
            variables = (index.name if all_progressions else "_",)
        return For(variables, iterable, tuple(with_variable(statement, index, start, step) for statement in body))

    def _elements(self, body: Sequence[Statement], index: Progression, stop: int) -> dict[Subscript, Expression]:
        """The elements that a loop takes one after the other, ``self.experts[i]`` → what it goes over to get them."""
        iterables: dict[Subscript, Expression] = {}
        for part in (part for statement in body for part in statement.walk()):
            if not isinstance(part, Subscript):
                continue
            holder = self._holder(part.owner)
            if part.indices == (call("str", index),):
                numbers = [str(number) for number in range(index.first, stop)]
                if holder is not None and holder.elements == numbers:
                    iterables[part] = method(part.owner, "values")
            elif part.indices == (index,):
                length = len(holder.elements) if holder is not None else self._lists.length(part.owner)
                if length is not None and length >= stop:
                    bounds = Slice(
                        literal(index.first) if index.first else None, literal(stop) if stop < length else None
                    )
                    iterables[part] = part.owner if bounds == Slice() else Subscript(part.owner, (bounds,))
        return iterables

    def _holder(self, owner: Expression) -> ModuleTree | None:
        """The list or dict of modules that an expression stands for."""
        for path in (name.split(".") for name in self._tree.paths()):
            if self._tree.access(path) == owner:
                tree = self._tree.at(path)
                return tree if isinstance(tree, ModuleTree) else None
        return None

    def _element(self, item: StatementLoop, owner: Expression, owners: int) -> str:
        if item.source.element and owners == 1:
            return variable(item.source.element, "x")
        last = owner.name if isinstance(owner, (Name, Attribute)) else ""
        return variable(last.removesuffix("s") or "each", "each")

    def _range(self, item: StatementLoop, body: Sequence[Statement], start: int, step: int) -> Expression:
        """``range(x.shape[1])``, of a value that the loop goes along to its end; else of a number."""
        count = len(item.iterations)
        last = start + count if step == 1 else count
        size = self._size(item, body, Progression(start, step), last) if step == 1 or start == count - 1 else None
        stop = size or (self._number(item.source, count) if start == 0 and step == 1 else None)
        if stop is not None and step == 1:
            return call("range", *([literal(start)] if start else []), stop)
        if stop is not None:
            return call("reversed", call("range", stop))
        if step == -1:
            return call("range", literal(start), literal(start - count), literal(-1))
        return call("range", *([literal(start)] if start else []), literal(start + count))

    def _size(
        self, item: StatementLoop, body: Sequence[Statement], index: Progression, count: int
    ) -> Expression | None:
        """``x.shape[1]`` for a value from outside of which an iteration takes ``x[:, i]``."""
        tensors = [node for node in item.reads if isinstance(node.meta.get("val"), torch.Tensor)]
        owners = {self._values.written[node].text: node for node in tensors}
        for owner, dim in _sizes(item.source.iterable):
            node = self._values.variables.get(owner)
            if node in tensors and dim < len(shape_of(node)) and shape_of(node)[dim] == count:
                return Subscript(Attribute(Name(owner), "shape"), (literal(dim),))
        for part in (part for statement in body for part in statement.walk()):
            if isinstance(part, Subscript) and index in part.indices and part.owner.text in owners:
                dim = part.indices.index(index)
                counted = all(isinstance(entry, Slice) or entry.text.isdecimal() for entry in part.indices[:dim])
                if counted and shape_of(owners[part.owner.text])[dim] == count:
                    return Subscript(Attribute(part.owner, "shape"), (literal(dim),))
        return None


def _names(statement: Statement) -> set[str]:
    return {part.name for part in statement.walk() if isinstance(part, Name)}


def _replaced(statement: Part, replacements: Mapping[Subscript, Name]) -> Part:
    def change(part: Any) -> Any:
        if isinstance(part, Subscript) and part in replacements:
            return replacements[part]
        return part.rebuilt(change)

    changed: Part = change(statement)
    return changed


def _sizes(tree: ast.AST | None) -> Iterator[tuple[str, int]]:
    """``x`` and 1 for ``x.shape[1]`` and ``x.size(1)`` in the source."""
    for node in ast.walk(tree) if tree is not None else ():
        match node:
            case ast.Subscript(
                value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=ast.Constant(value=int(dim))
            ):
                yield name, dim
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="size"), args=[ast.Constant(value=int(dim))]
            ):
                yield name, dim
