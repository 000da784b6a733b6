"""Rules for a mixture of experts: tokens of all rows are sorted by their expert, computed, and put back.

experts [tokens * k] ─ sort ─▶ order ─┬─ x[order // k] ─▶ sorted tokens ─ grouped_mm(offsets) ─▶ sorted results ─┐
                         └─ histc ─ cumsum ─▶ offsets                                                           │
                                      └─ order → places (its inverse) ─────────── results[places] ─▶ tokens ◀───┘

Each token meets weights alone, so that its row depends on no other. A value that is sorted has rows in another order,
which the `Sorted` in its state names; only reading it at the places of that order gives rows again.
"""

from __future__ import annotations

from typing import Final

from torch import fx

from pipegraph.graph.batch.row_call import RowCall
from pipegraph.graph.batch.row_state import (
    INVARIANT,
    Content,
    Counts,
    NoRuleError,
    Rows,
    RowsMixError,
    Sorted,
    State,
)
from pipegraph.graph.batch.shape_rules import Rule, source
from pipegraph.graph.operators import operator_of


def _order_of(state: State, kind: str) -> Sorted:
    """The `Sorted` content of a state. Raises NoRuleError if it has another content or kind."""
    if isinstance(state, Rows) and isinstance(state.content, Sorted) and state.content.kind == kind:
        return state.content
    raise NoRuleError


def sort(call: RowCall) -> State | tuple[State, ...]:
    """For the order of all tokens by a key, or the inverse of such an order."""
    state = call.state(source(call))
    if not isinstance(state, Rows) or len(call.shape_of(source(call))) != 1:
        raise NoRuleError
    if isinstance(state.content, Sorted) and call.name == "argsort":
        order = _order_of(state, "order")
        if order.step != 1:
            raise NoRuleError
        return Rows(0, state.inner, Sorted("places", order.keys))
    if state.content is not Content.DATA:
        raise NoRuleError
    keys = _keys(source(call))
    places = Rows(0, state.inner, Sorted("order", keys))
    return places if call.name == "argsort" else (Rows(0, state.inner, Sorted("values", keys)), places)


def _keys(node: fx.Node) -> fx.Node:
    """The value that a cast or a reshape shows."""
    while (operator_of(node).cast or operator_of(node).view is not None) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def divide(call: RowCall) -> State:
    """For the tokens of an order of pairs of a token and an expert."""
    state, divisor = call.state(source(call)), call["other"]
    order = _order_of(state, "order")
    if type(divisor) is not int or order.step != 1:
        raise NoRuleError
    assert isinstance(state, Rows)
    return Rows(0, state.inner, Sorted("order", order.keys, divisor))


def index(call: RowCall) -> State:
    """For tokens in the order of their experts, or again in their own."""
    indices = call["indices"]
    if len(indices) != 1:
        raise NoRuleError
    values, places = call.state(source(call)), call.state(indices[0])
    if not isinstance(values, Rows) or not isinstance(places, Rows) or not isinstance(places.content, Sorted):
        raise NoRuleError
    if values.dim != 0 or places.dim != 0:
        raise NoRuleError
    order = places.content
    if order.kind == "order" and values.content is Content.DATA and values.inner * order.step == places.inner:
        return Rows(0, places.inner, Sorted("values", order.keys))
    if order.kind == "places" and values.content == Sorted("values", order.keys) and values.inner == places.inner:
        return Rows(0, places.inner)
    raise NoRuleError


def inverse(call: RowCall) -> State:
    """For positions that are written at an order, which gives its inverse."""
    indices, values = call["indices"], call.state(call["values"])
    if len(indices) != 1 or not isinstance(values, Rows) or values.content is not Content.POSITIONS:
        raise NoRuleError
    order = _order_of(call.state(indices[0]), "order")
    if order.step != 1:
        raise NoRuleError
    return Rows(0, values.inner, Sorted("places", order.keys))


def counts(call: RowCall) -> State:
    """For how often each expert is chosen."""
    state = call.state(source(call))
    if isinstance(state, Counts):  # their sums
        return state
    if not isinstance(state, Rows) or call.name not in ("histc", "bincount"):
        raise NoRuleError
    if isinstance(state.content, Sorted):
        return Counts(_order_of(state, "values").keys)
    if state.content is not Content.DATA:
        raise NoRuleError
    return Counts(_keys(source(call)))


def grouped_product(call: RowCall) -> State:
    """For each token and the weights of its expert."""
    state, offsets = call.state(source(call)), call.state(call["offs"])
    order = _order_of(state, "values")
    if not isinstance(offsets, Counts) or offsets.keys is not order.keys or call.state(call.node.args[1]) != INVARIANT:
        raise RowsMixError
    return state


EXPERT_RULES: Final[dict[str, Rule]] = {
    "sort": sort,
    "argsort": sort,
    "floor_divide": divide,
    "index": index,
    "index_put": inverse,
    "histc": counts,
    "bincount": counts,
    "cumsum": counts,
    "to": counts,
    "_to_copy": counts,
    "_grouped_mm": grouped_product,
}
"""Operator → its rule where a value is sorted by experts. Other rules hold for what does not look at the order."""
