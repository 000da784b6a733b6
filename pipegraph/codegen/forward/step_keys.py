"""What tells whether two items of a ``forward`` are one step of two iterations of a loop of the model's source."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import fx

from pipegraph.codegen.forward.items import HelperCall, Item, ModuleCall, Operation
from pipegraph.codegen.names.source_loops import SourceLoop, loops_at
from pipegraph.codegen.names.source_statements import SourceStatements, is_of_torch
from pipegraph.graph.captured import BRANCH
from pipegraph.graph.internals import pytree
from pipegraph.graph.nodes import shape_of

LoopFrame = tuple[int, SourceLoop]
"""A loop of the source, and the number of the frame in which it is."""


def lines_of(item: Item, source: SourceStatements, fqn: str) -> tuple[tuple[str, int], ...]:
    """The files and lines of the source that led to an item, outermost first."""
    if not isinstance(item, (Operation, ModuleCall, HelperCall)):
        return ()
    return source.lines_within(fqn, item.nodes[0], item.fqn if isinstance(item, ModuleCall) else None)


def loops_around(lines: Sequence[tuple[str, int]]) -> tuple[LoopFrame, ...]:
    """The loops of the source that lines are in, outermost first."""
    model_lines = ((frame, file, line) for frame, (file, line) in enumerate(lines) if not is_of_torch(file))
    return tuple((frame, loop) for frame, file, line in model_lines for loop in loops_at(file, line))


def key_of(item: Item, lines: object) -> object:
    """What two steps have in common if they are one step of two iterations; for an item that is in none, the item."""
    if not isinstance(item, (Operation, ModuleCall, HelperCall)) or any(BRANCH in node.meta for node in item.nodes):
        return item
    if isinstance(item, Operation):
        node = item.node
        leaves = tuple(_kind(leaf) for leaf in pytree.tree_leaves((node.args, node.kwargs)))
        structure = str(pytree.tree_structure((node.args, node.kwargs)))
        return node.target, leaves, structure, lines, repr(node.meta["regions"]), "writes" in node.meta
    if isinstance(item, ModuleCall):
        path = re.sub(r"\b\d+\b", "#", item.fqn)
        arguments = item.arguments
        form = arguments.form if arguments is not None else tuple(("", 1) for _ in item.reads)
        return (
            path,
            item.model_class,
            form,
            repr((arguments.settings, arguments.unpacked) if arguments else ()),
            item.parameters,
            lines,
        )
    return item.function, len(item.reads), lines


def _kind(leaf: object) -> object:
    """A value is like any other, and so is a whole number."""
    return fx.Node if isinstance(leaf, fx.Node) else int if type(leaf) is int else repr(leaf)


def rank_of(node: fx.Node) -> object:
    """The dtype of a tensor and the number of its dimensions, which may be longer in each iteration: ``x[:i]``. Of any
    other value, all of its form."""
    value = node.meta.get("val")
    return (value.dtype, value.dim()) if isinstance(value, torch.Tensor) else form_of(node)


def form_of(node: fx.Node) -> object:
    """The shape and dtype of a value, or of those in a tuple."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return shape_of(node), value.dtype
    if not isinstance(value, (tuple, list)):
        return value
    return tuple((part.shape, part.dtype) if isinstance(part, torch.Tensor) else part for part in value)
