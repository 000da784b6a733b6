"""Helpers for the nodes of a captured graph: metadata, arguments, sizes, source lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from pipegraph.errors import is_user_file
from pipegraph.graph.symbolic_size import SymbolicSize
from pipegraph.torch_private.fake_tensors import fake_empty
from pipegraph.torch_private.operators import OpOverload, schema_arguments
from pipegraph.torch_private.pytrees import pytree

aten = torch.ops.aten

OTHER_DTYPE = "other_dtype"
"""Key of a node's metadata: the dtype of its value if the model is converted to another dtype."""

RELATIVE_DTYPE = "relative_dtype"
"""Key of a node's metadata: the model gives it the dtype of another value."""

RELATIVE_NUMBERS = "relative_numbers"
"""Key of a node's metadata: argument → the dtypes of the model, and what ``torch.finfo`` says that the argument is."""

_DIMENSION = re.compile(r"(start_|end_)?dim|axis")

_FRAME = re.compile(r'File "(.*)", line (\d+), in ')


def label_of(node: fx.Node) -> str:
    """The name of a node in ``Captured.args``, ``kwargs`` and ``outputs``: for an input that of the model's argument,
    from which the node's own name may differ (an argument that is called ``torch``)."""
    return str(node.target) if node.op == "placeholder" else node.name


def path_of(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """The module calls that ``node`` ran in, outermost first, the model itself left out: (call, FQN)."""
    return node.meta.get("path", ())


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments that the graph passes, by their names in the operator's schema; defaults are left out."""
    assert isinstance(node.target, OpOverload)
    names = (argument.name for argument in schema_arguments(node.target))
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def dimensions_of(node: fx.Node) -> frozenset[int]:
    """The numbers among the arguments of an operation that name dimensions: 2, 0 and 1 of ``x.permute(2, 0, 1)``."""
    if not isinstance(node.target, OpOverload):
        return frozenset()
    named = [value for name, value in arguments_of(node).items() if _DIMENSION.match(name)]
    return frozenset(leaf for leaf in pytree.tree_leaves(named) if type(leaf) is int)


SIZES = "sizes"
"""Key of a node's metadata: the shape of its value, with a `SymbolicSize` for each dynamic size."""


def shape_of(node: object) -> tuple[int, ...]:
    """The shape of a value that is a tensor. A dynamic size is equal only to one with the same expression."""
    assert isinstance(node, fx.Node)
    return node.meta.get(SIZES) or tuple(node.meta["val"].shape)


def named_sizes(node: fx.Node) -> list[SymbolicSize]:
    """The dynamic sizes among the arguments of an operation."""
    return [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, SymbolicSize)]


def dimension_of(node: fx.Node, expression: sympy.Expr) -> int | None:
    """The first dimension of a tensor that has a dynamic size; None if it has none."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    sizes = enumerate(shape_of(node))
    return next((dim for dim, size in sizes if isinstance(size, SymbolicSize) and size.expression == expression), None)


def parameter_values(nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """The operations whose results depend on a parameter: those of a mask do not. Nodes in the order of the graph."""
    values: set[fx.Node] = set()
    for node in nodes:
        if any(parent in values or parent.meta.get("kind") == "parameter" for parent in node.all_input_nodes):
            values.add(node)
    return frozenset(values)


def dynamic_sizes_of(nodes: Iterable[fx.Node]) -> list[sympy.Expr]:
    """The dynamic sizes of tensors."""
    tensors = (node for node in nodes if isinstance(node.meta.get("val"), torch.Tensor))
    return [size.expression for node in tensors for size in shape_of(node) if isinstance(size, SymbolicSize)]


def dtypes_of(node: fx.Node) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtype of a tensor, and the one that it has if the model is converted, if that is known."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None, node.meta.get(OTHER_DTYPE)


def number_of(tensor: torch.Tensor) -> Any:
    """The number in a tensor of one element. A float is the shortest decimal that the tensor's dtype rounds to it: 0.3
    in float32, which is 0.30000001192092896."""
    number: Any = tensor.item()
    if not isinstance(number, float):
        return number
    shorter = (float(f"{number:.{digits}g}") for digits in range(1, 17))
    return next((decimal for decimal in shorter if torch.tensor(decimal, dtype=tensor.dtype).item() == number), number)


def value_bytes(node: fx.Node) -> int:
    """The bytes of a node's value, or of all tensors in it."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def set_value(node: fx.Node, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> None:
    """Let a value be a tensor of another shape or dtype, on its device."""
    node.meta["val"] = fake_empty(node.meta["val"], tuple(map(int, shape)), dtype, strides)
    node.meta[SIZES] = tuple(shape)


def on_meta(node: fx.Node) -> Any:
    """An empty stand-in on the meta device for a value (or for the tensors of a tuple), to try an operation on."""

    def empty(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return pytree.tree_map_only(torch.Tensor, empty, node.meta.get("val"))


def follows_model(node: fx.Node) -> bool:
    """Return whether a value has another dtype if the model is converted to another dtype."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and node.meta.get(OTHER_DTYPE, value.dtype) != value.dtype


def keeps_dtype(node: fx.Node) -> bool:
    """Return whether a value of floats has the same dtype if the model is converted to another one."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and node.meta.get(OTHER_DTYPE) == value.dtype


def any_layout(node: fx.Node) -> Any:
    """The operator of a node, or ``reshape``, which takes any layout of memory, for a ``view``."""
    return aten.reshape.default if node.target is aten.view.default else node.target


def source_lines(node: fx.Node) -> tuple[tuple[str, int], ...]:
    """The files and lines of the model's source that led to an operation, innermost first."""
    matches = map(_FRAME.match, map(str.strip, str(node.meta.get("stack_trace") or "").splitlines()))
    return tuple((match[1], int(match[2])) for match in matches if match)[::-1]


def source_line(node: fx.Node) -> str:
    """``model.py:12: h = h.nonzero()``: the line of the model's source that ran an operation; empty if unknown.

    It is the innermost line of the user's own source, if there is one: not one of a module of torch.
    """
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    frames = [(position, match) for position, line in enumerate(lines) if (match := _FRAME.match(line))]
    if not frames:
        return ""
    index = next((index for index in reversed(range(len(frames))) if is_user_file(frames[index][1][1])), -1)
    position, match = frames[index]
    stop = frames[index + 1][0] if 0 <= index < len(frames) - 1 else len(lines)
    return f"{match[1]}:{match[2]}: {' '.join(lines[position + 1 : stop])}"
