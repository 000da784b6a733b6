"""Rules for operators that read or write at indices.

A row may be read by its own number: ``mask[torch.arange(batch), positions]`` reads the mask of the row itself. Any
other number of a row is another row.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from pipegraph.graph.batch.row_call import RowCall, moved_by
from pipegraph.graph.batch.row_state import INVARIANT, Content, NoRuleError, Rows, RowsMixError, State
from pipegraph.graph.batch.shape_rules import Rule, source


def embedding(call: RowCall) -> State:
    """For rows of a table at indices."""
    state = call.state(call["indices"])
    if call.rows(call["weight"]) is not None:
        raise NoRuleError
    return _read_whole(state)


def _read_whole(state: State) -> State:
    """The rows of what indices read from a whole tensor."""
    if isinstance(state, Rows) and state.content is Content.NUMBERS:
        raise RowsMixError  # row 3 of the batch reads row 3 of a table
    return state


def index(call: RowCall) -> State:
    """For elements at indices of several dimensions, which are broadcast together."""
    indices = list(call["indices"])
    state = call.state(source(call))
    read = _broadcast(call, indices)
    place = _place(indices)
    count = max(len(call.shape_of(node)) for node in indices if node is not None)
    if not isinstance(state, Rows):
        read = _read_whole(read)
        return Rows(place + read.dim, read.inner, read.content) if isinstance(read, Rows) else INVARIANT
    at_rows = indices[state.dim] if state.dim < len(indices) else None
    if at_rows is None:
        if isinstance(read, Rows):
            raise RowsMixError  # each row reads at the indices of all rows
        slot = sum(node is None for node in indices[: state.dim]) + max(0, state.dim - len(indices))
        slots = [dim for dim in range(len(call.shape)) if not place <= dim < place + count]
        return Rows(slots[slot], state.inner, state.content)
    rows = call.state(at_rows)
    if not call.sizes.vary:
        raise NoRuleError  # the numbers of rows that do not vary are those of any range
    if not (isinstance(rows, Rows) and rows.content is Content.NUMBERS) or state.inner != 1:
        raise RowsMixError
    if call.shape_of(source(call))[state.dim] != call.sizes.rows:
        raise NoRuleError
    dim = rows.dim + count - len(call.shape_of(at_rows))
    if isinstance(read, Rows) and read.dim != dim:
        raise RowsMixError
    return Rows(place + dim, 1, state.content)


def _broadcast(call: RowCall, indices: list[Any]) -> State:
    """The rows of indices together. Raises NoRuleError for a mask, whose number of elements depends on values."""
    nodes = [node for node in indices if node is not None]
    if any(node.meta["val"].dtype in (torch.bool, torch.uint8) for node in nodes):
        raise NoRuleError
    count = max(len(call.shape_of(node)) for node in nodes)
    states = [(call.state(node), count - len(call.shape_of(node))) for node in nodes]
    moved = [
        Rows(state.dim + offset, state.inner, state.content) for state, offset in states if isinstance(state, Rows)
    ]
    if len({(rows.dim, rows.inner) for rows in moved}) > 1:
        raise RowsMixError
    for node, (state, offset) in zip(nodes, states, strict=True):
        if isinstance(state, Rows) or not moved or not call.sizes.vary or moved[0].dim < offset:
            continue
        if call.shape_of(node)[moved[0].dim - offset] != 1:
            raise RowsMixError
    numbers = [rows for rows in moved if rows.content is Content.NUMBERS]
    return next(iter((*numbers, *moved)), INVARIANT)


def _place(indices: list[Any]) -> int:
    """The dimension of the result at which those of the indices begin: the first, unless the indices are adjacent."""
    used = [dim for dim, node in enumerate(indices) if node is not None]
    return used[0] if used == list(range(used[0], used[-1] + 1)) else 0


def gather(call: RowCall) -> State:
    """For elements at the indices of one dimension, each at the place of its index in the others."""
    dim = call.dim("dim", source(call))
    indices = call["index"] if call["index"] is not None else call["indices"]
    state, index = call.rows(source(call)), call.rows(indices)
    if state is None and index is not None and index.dim == dim:
        return index
    common = call.aligned((node, moved_by(0)) for node in (source(call), indices))
    if common is not None and common.dim == dim:
        raise RowsMixError
    return INVARIANT if common is None else Rows(common.dim, common.inner)


def index_select(call: RowCall) -> State:
    """For the entries of one dimension at a list of indices."""
    dim = call.dim("dim", source(call))
    state, index = call.rows(source(call)), call.state(call["index"])
    if state is None:
        read = _read_whole(index)
        return Rows(dim, read.inner) if isinstance(read, Rows) else INVARIANT
    if state.dim == dim or isinstance(index, Rows):
        raise RowsMixError
    return state


def scatter(call: RowCall) -> State:
    """For elements that are written at the indices of one dimension, each at the place of its index in the others."""
    dim = call.dim("dim", source(call))
    nodes = [node for node in (source(call), call["index"], call["src"]) if isinstance(node, fx.Node)]
    state = call.aligned(((node, moved_by(0)) for node in nodes), broadcasts=False)
    if state is None:
        return INVARIANT
    if state.dim == dim:
        raise RowsMixError
    return Rows(state.dim, state.inner)


def index_add(call: RowCall) -> State:
    """For entries that are written at a list of indices of one dimension."""
    dim = call.dim("dim", source(call))
    if call.rows(call["index"]) is not None:
        raise RowsMixError
    state = call.aligned(((node, moved_by(0)) for node in (source(call), call["source"])), broadcasts=False)
    if state is not None and state.dim == dim:
        raise RowsMixError
    return Rows(state.dim, state.inner) if state is not None else INVARIANT


def index_put(call: RowCall) -> State:
    """For elements that are written at indices of several dimensions, or where a mask is true."""
    indices, target = list(call["indices"]), source(call)
    state = call.rows(target)
    used = [node for node in indices if node is not None]
    if len(used) == 1 and used[0].meta["val"].dtype == torch.bool:
        if (
            indices[0] is None
            or call.state(call["values"]) != INVARIANT
            or call.shape_of(call["values"]) not in ((), (1,))
        ):
            raise NoRuleError
        mask = call.rows(used[0])
        if state is None or (mask is not None and (mask.dim, mask.inner) != (state.dim, state.inner)):
            raise NoRuleError
        return state
    if state is None:
        raise RowsMixError if isinstance(call.state(call["values"]), Rows) else NoRuleError
    at_rows = indices[state.dim] if state.dim < len(indices) else None
    place, count = _place(indices), max(len(call.shape_of(node)) for node in used)
    read = _broadcast(call, indices)
    if at_rows is None and isinstance(read, Rows):
        raise RowsMixError
    if at_rows is None:
        slots = [dim for dim in range(_written_dims(call, indices, count)) if not place <= dim < place + count]
        dim = slots[sum(node is None for node in indices[: state.dim]) + max(0, state.dim - len(indices))]
    else:
        rows = call.state(at_rows)
        if not (isinstance(rows, Rows) and rows.content is Content.NUMBERS) or state.inner != 1:
            raise RowsMixError
        dim = place + rows.dim + count - len(call.shape_of(at_rows))
    offset = _written_dims(call, indices, count) - len(call.shape_of(call["values"]))
    written = call.aligned([(call["values"], moved_by(offset))])
    if written is not None and written.dim != dim:
        raise RowsMixError
    return Rows(state.dim, state.inner)


def _written_dims(call: RowCall, indices: list[Any], count: int) -> int:
    """How many dimensions the written values have, broadcast."""
    return len(call.shape_of(source(call))) - sum(node is not None for node in indices) + count


INDEX_RULES: Final[dict[str, Rule]] = {
    name: rule
    for names, rule in (
        ("embedding", embedding),
        ("index _unsafe_index", index),
        ("gather take_along_dim", gather),
        ("index_select", index_select),
        ("scatter scatter_add scatter_reduce", scatter),
        ("index_add index_copy", index_add),
        ("index_put _unsafe_index_put", index_put),
    )
    for name in names.split()
}
