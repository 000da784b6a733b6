"""Write values that are the same for every input as a person would: numbers in place, masks as causal or windows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import sympy
import torch
from torch import fx

from pipegraph.graph.aliasing import is_stable
from pipegraph.graph.captured import PIPE_SPLITS, VALUE
from pipegraph.graph.nodes import (
    OTHER_DTYPE,
    RELATIVE_DTYPE,
    SIZES,
    arguments_of,
    dtypes_of,
    named_sizes,
    set_value,
    shape_of,
)
from pipegraph.graph.operators import operator_of
from pipegraph.graph.symbolic_size import SymbolicSize
from pipegraph.torch_private.operators import OpOverload, is_mutable
from pipegraph.torch_private.pytrees import pytree

aten = torch.ops.aten

# Operations that take a tensor of indices, and also accept a list.
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
_FROM_READER = ("path", "functions", "regions", "stack_trace", PIPE_SPLITS)

# A mask of at most this number of operations (``positions > 0``) stays as it is: the plain form is not shorter.
_OPERATIONS = 4
# The largest tensor that is computed while capturing: the masks of 8,192 tokens in 2 rows.
_LARGEST = 2**27
# A mask is tried with smaller values of large dynamic sizes: equal modulo this number, and at least this number above
# the numbers that the mask is made from.
_BEYOND = 64

_Ends = tuple[int | None, int | None]
"""The lowest and the highest of the diagonals column − row on which a mask is true; None for no such end."""


def write_constants(graph: fx.Graph) -> None:
    """Replace a constant of one element, or a short list of indices, by operations that make it for each reader.

    Otherwise the stage would store it as a buffer.

    before:  c = get_attr(constant);  y = mul(x, c)      # torch.tensor(64.0) in the model's code
    after:   c = full([], 64.0);  y = mul(x, c)
    """
    for node in list(graph.find_nodes(op="get_attr")):
        value = node.meta.get(VALUE)
        if value is None or not is_stable(node):
            continue
        for reader in [reader for reader in node.users if reader.op == "call_function"]:
            if isinstance(value, list):
                if reader.target in _INDEXED:
                    numbers = [_full(node, reader, (), number) for number in value]
                    reader.replace_input_with(node, _constant_node(node, reader, aten.stack.default, (numbers,)))
            elif reader.target is aten.fill_.Tensor:
                reader.target, reader.args = aten.fill_.Scalar, (reader.args[0], value)
            elif not math.isnan(value):
                reader.replace_input_with(node, _full(node, reader, shape_of(node), value))
        if not node.users:
            graph.erase_node(node)


def _full(node: fx.Node, reader: fx.Node, shape: Sequence[int], number: float) -> fx.Node:
    """``full(shape, number)`` for a reader of a constant."""
    value = node.meta["val"]
    kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    full_node = _constant_node(node, reader, aten.full.default, (list(shape), number), kwargs)
    set_value(full_node, shape, value.dtype)
    dtype, other_dtype = dtypes_of(node)
    if other_dtype not in (None, dtype) and float(torch.tensor(number, dtype=other_dtype)) != number:
        full_node.meta[RELATIVE_DTYPE] = True  # rounded to the model's dtype, it is another number
    return full_node


def _constant_node(
    node: fx.Node, reader: fx.Node, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """An operation that makes a constant for one reader, on the line of that."""
    with node.graph.inserting_before(reader):
        operation = node.graph.call_function(target, args, kwargs)
    operation.meta = {
        "val": node.meta["val"],
        SIZES: shape_of(node),
        "in_every_mode": False,
        **{key: reader.meta[key] for key in _FROM_READER if key in reader.meta},
        **({OTHER_DTYPE: node.meta[OTHER_DTYPE]} if OTHER_DTYPE in node.meta else {}),
    }
    return operation


@dataclass(frozen=True)
class _Band:
    """A [rows, columns] mask that is true where ``lowest`` ≤ column − row ≤ ``highest``; None for no such end."""

    rows: int
    columns: int
    lowest: int | None
    highest: int | None

    @property
    def is_full(self) -> bool:
        return self.lowest is None and self.highest is None

    @property
    def is_causal(self) -> bool:
        return self.lowest is None and self.highest == 0 and self.rows == self.columns


def simplify_masks(graph: fx.Graph) -> None:
    """Replace fixed masks by ``torch.ones(…).tril()`` and the like, and a causal mask of an attention by its argument
    ``is_causal=True``; a mask that masks nothing goes.

    before:  p = arange(64);  q = unsqueeze(p, 1);  m = le(p, q);  n = …;  y = scaled_dot_product_attention(q, k, v, n)
    after:   y = scaled_dot_product_attention(q, k, v, is_causal=True)      # what made the mask is dead
    """
    unknown: set[fx.Node] = set()
    bands: dict[fx.Node, _Band] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_fixed(node, unknown):
            unknown.add(node)
        elif _is_mask(node) and _has_other_readers(node, unknown) and _operations_for(node) > _OPERATIONS:
            band = _band_at_every_size(node)
            if band is not None:
                bands[_write(node, band)] = band
    for mask, band in bands.items():
        for user in list(mask.users):
            _simplify_use(user, mask, band)


def _is_fixed(node: fx.Node, unknown: set[fx.Node]) -> bool:
    """Return whether an operation gives the same for every input, and its fixed sizes are small enough to try it."""
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload) or target.namespace != "aten" or is_mutable(target):
        return False
    if not isinstance(value, torch.Tensor) or node.meta["regions"]:
        return False
    if prod(size for size in shape_of(node) if not isinstance(size, SymbolicSize)) > _LARGEST:
        return False
    undefined = torch.Tag.nondeterministic_seeded in target.tags or operator_of(node).uninitialized
    return not undefined and not any(parent in unknown for parent in node.all_input_nodes)


def _is_mask(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.dtype == torch.bool and value.dim() >= 2 and min(value.shape[-2:]) > 1)


def _has_other_readers(node: fx.Node, unknown: set[fx.Node]) -> bool:
    """Return whether a mask has a reader other than fixed masks. Intermediate masks of a computation have none."""
    return any(not (user.op == "call_function" and _is_fixed(user, unknown) and _is_mask(user)) for user in node.users)


def _operations_for(node: fx.Node) -> int:
    """The number of operations that serve only to make ``node``, itself included."""
    operations = {node}
    waiting = list(node.all_input_nodes)
    while waiting:
        parent = waiting.pop(0)
        if parent.op == "call_function" and operations.issuperset(parent.users):
            operations.add(parent)
            waiting.extend(parent.all_input_nodes)
    return len(operations)


def _band_at_every_size(node: fx.Node) -> _Band | None:
    """The band that a fixed mask is at every size; None for any other pattern.

    A mask may be causal for a short text and a window for a long one. The mask is therefore computed at the sizes of
    the example, or smaller ones in place of large ones, at others, and with each size of its rows and columns larger
    than every number from which the mask is made.
    """
    operations = _source_operations(node)
    largest = max((abs(number) for operation in operations for number in _numbers(operation)), default=0)
    symbols = {
        symbol: size - max(0, (size - largest) // _BEYOND - 1) * _BEYOND
        for operation in operations
        for symbol, size in _symbols(operation).items()
    }
    samples = [symbols, {symbol: size + 1 for symbol, size in symbols.items()}] if symbols else [symbols]
    rows, columns = shape_of(node)[-2:]
    across = {symbol for size in (rows, columns) if isinstance(size, SymbolicSize) for symbol in size.symbols}
    for symbol in across & symbols.keys():  # each alone: what is causal of two equal lengths may be no more of others
        size = symbols[symbol]
        samples.append({**symbols, symbol: size + (largest + 1 if size <= largest else 2)})
    distinct_ends: set[_Ends | None] = set()
    for sizes in samples:
        if prod(_number(size, sizes) for size in shape_of(node)) > _LARGEST:
            return None
        distinct_ends.add(_ends(_computed(node, operations, sizes)))
    ends = distinct_ends.pop() if len(distinct_ends) == 1 else None
    return _Band(rows, columns, *ends) if ends is not None else None


def _source_operations(node: fx.Node) -> set[fx.Node]:
    """The operations that make a value, its own included."""
    operations: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        operation = waiting.pop()
        if operation not in operations:
            operations.add(operation)
            waiting.extend(operation.all_input_nodes)
    return operations


def _symbols(node: fx.Node) -> dict[sympy.Symbol, int]:
    """The symbols in the arguments of an operation → their values at capture."""
    return {symbol: number for size in named_sizes(node) for symbol, number in size.symbols.items()}


def _numbers(node: fx.Node) -> Iterator[int]:
    """The whole numbers among the arguments of an operation, without those that mean "to the end"."""
    for leaf in pytree.tree_leaves((node.args, node.kwargs)):
        if isinstance(leaf, (int, float)) and not isinstance(leaf, (bool, SymbolicSize)) and abs(leaf) < _LARGEST:
            yield ceil(leaf)


def _number(argument: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    return argument.at(sizes) if isinstance(argument, SymbolicSize) else argument


def _computed(node: fx.Node, operations: set[fx.Node], sizes: Mapping[sympy.Symbol, int]) -> torch.Tensor:
    """The value of a fixed operation; the interpreter lets each intermediate value go after its last use."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for operation in sorted(operations):
        copy = copies[operation] = graph.node_copy(operation, copies.__getitem__)
        copy.args, copy.kwargs = pytree.tree_map(lambda leaf: _number(leaf, sizes), (copy.args, copy.kwargs))
        if "device" in operation.kwargs:
            copy.update_kwarg("device", torch.device("cpu"))
    graph.output(copies[node])
    with torch.no_grad():
        value: torch.Tensor = fx.Interpreter(fx.GraphModule({}, graph)).run()
    return value


def _ends(mask: torch.Tensor) -> _Ends | None:
    """The ends of the band that every [rows, columns] matrix of a mask is; None for any other pattern.

    Every diagonal starts in the first column or the first row, so these show where the band would lie.
    """
    rows, columns = mask.shape[-2:]
    matrix = mask[(0,) * (mask.dim() - 2)]
    diagonals = torch.cat([matrix[1:, 0].flip(0), matrix[0]]).nonzero()
    if not diagonals.numel():
        return None
    lowest, highest = int(diagonals[0]) - (rows - 1), int(diagonals[-1]) - (rows - 1)
    is_band = torch.equal(matrix, torch.ones(rows, columns, dtype=torch.bool).tril_(highest).triu_(lowest))
    if not is_band or not torch.equal(mask, matrix.expand(mask.shape)):
        return None
    return (None if lowest == 1 - rows else lowest), (None if highest == columns - 1 else highest)


def _write(node: fx.Node, band: _Band) -> fx.Node:
    """Put the plain form in the place of ``node``."""
    sizes = [band.rows, band.columns]
    kwargs = {"dtype": torch.bool, "device": node.meta["val"].device, "pin_memory": False}
    mask = _insert(node, aten.ones.default, (sizes,), sizes, kwargs)
    if band.highest is not None:
        mask = _insert(node, aten.tril.default, (mask, band.highest) if band.highest else (mask,), sizes)
    if band.lowest is not None:
        mask = _insert(node, aten.triu.default, (mask, band.lowest) if band.lowest else (mask,), sizes)
    if list(shape_of(node)) != sizes:
        mask = _insert(node, aten.expand.default, (mask, list(shape_of(node))), shape_of(node))
    node.replace_all_uses_with(mask)
    return mask


def _insert(
    next_node: fx.Node,
    target: OpOverload,
    args: tuple[Any, ...],
    sizes: Sequence[int],
    kwargs: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bool,
) -> fx.Node:
    """An operation before ``next_node``, in the same call and on the same line of the model's source."""
    with next_node.graph.inserting_before(next_node):
        operation = next_node.graph.call_function(target, args, kwargs or {})
    operation.meta = dict(next_node.meta)
    set_value(operation, sizes, dtype)
    return operation


def _simplify_use(user: fx.Node, mask: fx.Node, band: _Band) -> None:
    if user.target is aten.scaled_dot_product_attention.default:
        named = arguments_of(user)
        if named.get("attn_mask") is not mask or named.get("is_causal") or not (band.is_full or band.is_causal):
            return
        user.args = tuple(named.pop(name) for name in ("query", "key", "value"))
        user.kwargs = {name: value for name, value in named.items() if name != "attn_mask"}
        if not band.is_full:
            user.kwargs = {**user.kwargs, "is_causal": True}
    elif user.target in (aten.where.self, aten.where.ScalarOther) and user.args[0] is mask and band.is_full:
        operand, value = user.args[1], user.meta["val"]
        if isinstance(operand, fx.Node) and operand.meta["val"].dtype == value.dtype:
            if shape_of(operand) != shape_of(user):
                sizes = shape_of(user)
                operand = _insert(user, aten.expand.default, (operand, list(sizes)), sizes, dtype=value.dtype)
            user.replace_all_uses_with(operand)
