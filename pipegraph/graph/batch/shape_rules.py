"""Rules for operators that move elements, or make tensors of a shape: views, cuts, joins, factories.

Each rule takes an `RowCall` and returns the rows of its result. A view keeps the order of all elements: with
``stride`` elements between two rows, the row of element ``i`` is ``(i // stride) % B`` before and after it.

x [B, heads, tokens, width], rows along 0        stride = heads * tokens * width
x.view(B * heads, tokens, width)                 dim 0, inner = heads
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from pipegraph.graph.batch.row_call import RowCall, moved_by, uniform_rows
from pipegraph.graph.batch.row_state import INVARIANT, Content, NoRuleError, Rows, RowsMixError, Sorted, State
from pipegraph.torch_private.pytrees import pytree

Rule = Callable[[RowCall], State | tuple[State, ...]]

_PRIMES: Final = (2, 3, 5, 7, 11, 13, 17, 19)


def source(call: RowCall) -> Any:
    """The first argument, which the operator moves."""
    return call.node.args[0]


def rows_of(call: RowCall) -> Rows:
    """The rows of the first argument, which has some."""
    state = call.state(source(call))
    if not isinstance(state, Rows):
        raise NoRuleError
    return state


def unchanged(call: RowCall) -> State | tuple[State, ...]:
    """For a copy or cast of the first argument, whatever the others are."""
    return call.every(call.state(source(call)))


def reshape(call: RowCall) -> State:
    """For a view of all elements in the same order."""
    state, shape = call.state(source(call)), call.shape
    if not isinstance(state, Rows):
        return state if not any(map(call.sizes.has_rows, shape)) else uniform_rows(shape, call.sizes)
    if state.content is Content.UNIFORM:
        return uniform_rows(shape, call.sizes)
    source_shape = call.shape_of(source(call))
    if state.content is Content.EQUAL:
        is_in_place = math.prod(shape[state.dim + 1 :]) == math.prod(source_shape[state.dim + 1 :])
        if is_in_place and len(shape) > state.dim and shape[state.dim] == source_shape[state.dim]:
            return state
        state = Rows(state.dim, source_shape[state.dim] // call.sizes.rows)
    if isinstance(state.content, Sorted) and shape[: state.dim + 1] != source_shape[: state.dim + 1]:
        raise NoRuleError
    stride = state.inner * math.prod(source_shape[state.dim + 1 :])
    block = 1
    for dim in reversed(range(len(shape))):
        if stride % block == 0 and (block * shape[dim]) % (stride * call.sizes.rows) == 0:
            return Rows(dim, stride // block, state.content)
        block *= shape[dim]
    raise NoRuleError  # the rows themselves are divided, into groups for example


def permute(call: RowCall) -> State:
    """For dimensions in another order, which the operator itself says on a tensor whose sizes differ."""
    state = rows_of(call)
    count = len(call.shape_of(source(call)))
    if count > len(_PRIMES):
        raise NoRuleError
    moved = call.node.target(  # type: ignore[operator]
        torch.empty(_PRIMES[:count], device="meta"), *call.node.args[1:], **call.node.kwargs
    )
    return Rows(moved.shape.index(_PRIMES[state.dim]), state.inner, state.content)


def expand(call: RowCall) -> State:
    """For a view with larger dimensions: the copies along the batch are equal rows."""
    state, shape = call.state(source(call)), call.shape
    offset = len(shape) - len(call.shape_of(source(call)))
    if isinstance(state, Rows):
        return Rows(state.dim + offset, state.inner, state.content)
    if not call.shape_of(source(call)):
        return uniform_rows(shape, call.sizes)
    rows = uniform_rows(shape, call.sizes)
    return Rows(rows.dim, rows.inner, Content.EQUAL) if isinstance(rows, Rows) else rows


def repeat(call: RowCall) -> State:
    """For consecutive copies: rows keep their dimension, and copies of a tensor without rows are equal rows."""
    state, shape = call.state(source(call)), call.shape
    source_shape = call.shape_of(source(call))
    offset = len(shape) - len(source_shape)
    if isinstance(state, Rows):
        return Rows(state.dim + offset, state.inner, state.content)
    rows = uniform_rows(shape, call.sizes)
    if not isinstance(rows, Rows):
        return rows
    inner = (*(1,) * offset, *source_shape)[rows.dim]
    return Rows(rows.dim, inner, Content.EQUAL if inner == 1 else Content.DATA)


def repeat_interleave(call: RowCall) -> State:
    """For copies of each element side by side."""
    state = call.state(source(call))
    if call.overload != "self_int" or call["dim"] is None or call.sizes.is_batch(call["repeats"]):
        raise NoRuleError
    assert isinstance(state, Rows)
    inner = state.inner * int(call["repeats"]) if call.dim("dim", source(call)) == state.dim else state.inner
    return Rows(state.dim, inner, state.content)


def select(call: RowCall) -> State:
    """For one index of a dimension."""
    state, dim = rows_of(call), call.dim("dim", source(call), 0)
    if dim == state.dim:
        raise NoRuleError  # a loop over the rows reads each of them, and may put them together again
    return Rows(state.dim - (dim < state.dim), state.inner, state.content)


def slice_(call: RowCall) -> State:
    """For a range of a dimension: along that of the rows, it has to hold all rows as often as each other."""
    state, dim = call.state(source(call)), call.dim("dim", source(call), 0)
    if not isinstance(state, Rows):
        raise RowsMixError  # rows read a whole table by their numbers
    if dim != state.dim:
        return state
    size = call.shape_of(source(call))[dim]
    start = call.sizes.number(call["start"] or 0)
    start = max(start + size, 0) if start < 0 else min(start, size)
    return _part(call, state, start, call.shape[dim], call["step"] in (None, 1))


def _part(call: RowCall, state: Rows, start: int, length: int, is_dense: bool = True) -> Rows:
    """The rows of ``length`` elements from ``start`` on along the dimension of the rows."""
    period = state.inner * call.sizes.rows
    if not is_dense or start % period or length % period or not length:
        raise RowsMixError
    return state


def split(call: RowCall) -> tuple[State, ...]:
    """For the parts of a dimension."""
    state, dim = rows_of(call), call.dim("dim", source(call), 0)
    results = call.results or 0
    if dim != state.dim:
        return (state,) * results
    starts, parts = 0, []
    for index in range(results):
        length = call.result_shape(index)[dim]
        parts.append(_part(call, state, starts, length))
        starts += length
    return tuple(parts)


def unbind(call: RowCall) -> tuple[State, ...]:
    """For each index of a dimension."""
    return (select(call),) * (call.results or 0)


def cat(call: RowCall) -> State:
    """For tensors one after the other: along the dimension of the rows, all of them need to have rows."""
    tensors = [node for node in pytree.tree_leaves(source(call)) if call.shape_of(node) != (0,)]
    return call.aligned(((node, moved_by(0)) for node in tensors), broadcasts=False) or INVARIANT


def stack(call: RowCall) -> State:
    """For tensors along a new dimension."""
    tensors = pytree.tree_leaves(source(call))
    dim = int(call["dim"] or 0) % len(call.shape)
    return (
        call.aligned(((node, lambda place: place + (dim <= place)) for node in tensors), broadcasts=False) or INVARIANT
    )


def pad(call: RowCall) -> State:
    """For elements that are added at the ends of the last dimensions."""
    state = rows_of(call)
    from_last = len(call.shape) - 1 - state.dim
    amounts = call["pad"] if call["pad"] is not None else call["padding"]
    ends = list(amounts)[2 * from_last : 2 * from_last + 2]
    if any(isinstance(end, int) and int(end) for end in ends):
        raise RowsMixError
    return state


def other_places(call: RowCall) -> State:
    """For elements that change places along some dimensions."""
    state = rows_of(call)
    if call.arguments.get("dims") in (None, []) or state.dim in call.dims("dims", source(call)):
        raise RowsMixError
    return state


def triangle(call: RowCall) -> State:
    """For a part of the matrices of the last two dimensions."""
    state = rows_of(call)
    if state.dim >= len(call.shape) - 2:
        raise RowsMixError
    return state


def factory(call: RowCall) -> State:
    """For a tensor of one number, or of random numbers, which takes from other tensors no more than a shape."""
    return uniform_rows(call.shape, call.sizes)


def arange(call: RowCall) -> State:
    """For the numbers of the rows, or of all elements of several dimensions."""
    sizes = [value for value in call.node.args if call.sizes.is_batch(value)]
    if not call.sizes.has_rows(call.shape[0]) or len(sizes) != 1 or call["start"]:
        raise NoRuleError
    inner = call.shape[0] // call.sizes.rows
    if call["step"] not in (None, 1):
        if inner != 1 or call.sizes.number(call["end"]) != call.sizes.number(call["step"]) * call.sizes.rows:
            raise NoRuleError
        return Rows(0, 1, Content.STARTS)
    return Rows(0, inner, Content.NUMBERS if inner == 1 else Content.POSITIONS)


def slice_scatter(call: RowCall) -> State:
    """For a tensor in which a range of a dimension is replaced."""
    dim = call.dim("dim", source(call), 0)
    state = call.aligned(((node, moved_by(0)) for node in (source(call), call["src"])), broadcasts=False) or INVARIANT
    if isinstance(state, Rows) and state.dim == dim:
        raise RowsMixError
    return state


def select_scatter(call: RowCall) -> State:
    """For a tensor in which one index of a dimension is replaced."""
    dim = call.dim("dim", source(call), 0)
    places = ((source(call), moved_by(0)), (call["src"], lambda place: place + (dim <= place)))
    state = call.aligned(places, broadcasts=False) or INVARIANT
    if isinstance(state, Rows) and state.dim == dim:
        raise RowsMixError
    return state


def unfold(call: RowCall) -> State:
    """For windows along a dimension, in a new last dimension."""
    state = rows_of(call)
    if call.dim("dimension", source(call)) == state.dim:
        raise RowsMixError
    return state


SHAPE_RULES: Final[dict[str, Rule]] = {
    name: rule
    for names, rule in (
        ("to type_as _to_copy clone contiguous detach alias lift_fresh lift_fresh_copy positive", unchanged),
        ("view_as_real view_as_complex", unchanged),
        ("view reshape flatten unflatten squeeze unsqueeze view_as reshape_as ravel _unsafe_view", reshape),
        ("transpose permute t numpy_T mT mH matrix_H movedim moveaxis swapaxes swapdims adjoint", permute),
        ("expand expand_as broadcast_to", expand),
        ("repeat tile", repeat),
        ("repeat_interleave", repeat_interleave),
        ("select", select),
        ("slice narrow", slice_),
        ("split split_with_sizes chunk tensor_split", split),
        ("unbind", unbind),
        ("cat concat concatenate", cat),
        ("stack", stack),
        ("constant_pad_nd pad reflection_pad1d reflection_pad2d reflection_pad3d", pad),
        ("replication_pad1d replication_pad2d replication_pad3d", pad),
        ("flip roll", other_places),
        ("tril triu", triangle),
        ("zeros ones full empty new_zeros new_ones new_full new_empty zero fill", factory),
        ("zeros_like ones_like full_like empty_like scalar_tensor", factory),
        ("rand randn randint rand_like randn_like randint_like", factory),
        ("arange", arange),
        ("slice_scatter", slice_scatter),
        ("select_scatter", select_scatter),
        ("unfold", unfold),
    )
    for name in names.split()
}
"""Operator → its rule. These may read sizes that depend on the number of rows."""
