"""Inputs of the model that a stage needs for their sizes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sympy
import torch
from torch import fx

from pipegraph.graph.captured import Captured
from pipegraph.graph.nodes import named_sizes, path_of, shape_of
from pipegraph.graph.symbolic_size import SymbolicSize


def inputs_for_sizes(captured: Captured, nodes: Sequence[fx.Node], reads: Iterable[fx.Node]) -> list[fx.Node]:
    """The inputs of the model whose sizes a stage names and that follow from nothing that it reads or makes.

    That is rare: a stage that begins with a [batch · length, features] tensor and makes [batch, length, features] of
    it. Every rank may be given the model's inputs.

    Args:
        nodes: the operations of the stage, in order.
        reads: what it reads from outside.
    """
    outside = [node for node in reads if node.op != "get_attr"]
    wanted: dict[fx.Node, None] = {}
    for position, node in enumerate(nodes):
        for size in named_sizes(node):
            if not _follows(size.expression, [*outside, *wanted, *_in_reach(node, nodes[:position])]):
                for symbol in size.expression.free_symbols:
                    wanted |= dict.fromkeys(_holders(captured, symbol, [*outside, *wanted]))
    return list(wanted)


def dimension_of(node: fx.Node, expression: sympy.Expr) -> int | None:
    """The first dimension of a tensor that has a size that varies; None if it has none."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    sizes = enumerate(shape_of(node))
    return next((dim for dim, size in sizes if isinstance(size, SymbolicSize) and size.expression == expression), None)


def _follows(expression: sympy.Expr, values: Sequence[fx.Node]) -> bool:
    """Return whether an expression can be computed from sizes of values."""
    if expression.is_Integer or any(dimension_of(value, expression) is not None for value in values):
        return True
    return bool(expression.args) and all(_follows(part, values) for part in expression.args)


def _in_reach(node: fx.Node, before: Sequence[fx.Node]) -> list[fx.Node]:
    """Earlier values in the module call in which an operation runs, or in a call around it."""
    path = path_of(node)
    return [each for each in before if path[: len(path_of(each))] == path_of(each)]


def _holders(captured: Captured, symbol: sympy.Symbol, values: Sequence[fx.Node]) -> list[fx.Node]:
    """The first input of the model that has a size, unless a value has it."""
    if any(dimension_of(value, symbol) is not None for value in values):
        return []
    return [node for node in captured.inputs if dimension_of(node, symbol) is not None][:1]
