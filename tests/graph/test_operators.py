"""The table of operators: each name once, each spelling known; and how large the integers are that index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import pipegraph
from pipegraph.codegen.expressions.operator_spellings import spelling_function
from pipegraph.graph.operators import _ROWS, OPERATORS, Operator, View, index_bound, operator_of

NAMES = [name for names, _ in _ROWS for name in names.split()]


def test_names_stand_once() -> None:
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []
    assert list(OPERATORS) == NAMES


@pytest.mark.parametrize("column", ["spelling", "view", "may_copy", "optional_dtype", "dropout", "check", "flops_like"])
def test_operators_exist(column: str) -> None:
    names = [name for name, row in OPERATORS.items() if getattr(row, column)]
    assert names and all(hasattr(torch.ops.aten, name.partition(".")[0]) for name in names)


def test_spellings_are_known() -> None:
    written_as_they_are = {"", "F.name", "x[indices] = y", "x[…] = y"}
    spellings = {row.spelling for row in OPERATORS.values()} - written_as_they_are
    assert [spelling for spelling in spellings if spelling_function(spelling) is None] == []
    functions = [name for name, row in OPERATORS.items() if row.spelling == "F.name"]
    assert [name for name in functions if not hasattr(torch.nn.functional, name)] == []


@pytest.mark.parametrize(
    ("target", "view"),
    [
        (torch.ops.aten.view.default, View.RESHAPE),
        (torch.ops.aten.view.dtype, None),
        (torch.ops.aten.t.default, View.PERMUTE),
        (torch.relu, None),
    ],
)
def test_a_row_is_found_by_overload_then_by_name(target: object, view: View | None) -> None:
    node = fx.Graph().call_function(target)  # type: ignore[arg-type]
    assert operator_of(node).view is view


def test_an_unknown_operator_has_an_empty_row() -> None:
    assert operator_of(fx.Graph().call_function(torch.ops.aten.bmm.default)) == Operator()


class Indexes(nn.Module):
    def __init__(self, function: Callable[[Indexes, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.small = nn.Embedding(5, 4)
        self.register_buffer("table", torch.randn(7, 9))
        self.function = function

    def forward(self, ids: Tensor) -> Tensor:
        return self.function(self, ids)


@pytest.mark.parametrize(
    ("function", "bound"),
    [
        (lambda model, ids: model.embed(ids), 11),
        (lambda model, ids: model.embed(ids) + model.small(ids), 5),
        (lambda model, ids: model.embed(ids[:, 1:].reshape(-1).contiguous()), 11),
        (lambda model, ids: model.embed(ids.long().view(-1, 1)), 11),
        (lambda model, ids: model.table[ids].sum(), 7),
        (lambda model, ids: model.table[:, ids].sum(), 9),
        (lambda model, ids: model.table.index_select(1, ids[0]), 9),
        (lambda model, ids: model.table[:2].gather(1, ids), 9),
        (lambda model, ids: F.one_hot(ids, 6).float() @ model.table[:6], 6),
        (lambda model, ids: F.cross_entropy(model.table[:2], ids[:, 0]), 9),
        (lambda model, ids: F.nll_loss(model.table[:2], ids[:, 0]), 9),
        (lambda model, ids: F.cross_entropy(model.table[0], ids[0, 0]), 9),
        (lambda model, ids: model.table[0, 0].index_select(0, ids[0]), None),
        (lambda model, ids: model.table.index_add(1, ids[0], model.table[:, :3]), 9),
        (lambda model, ids: model.table.sum() * ids, None),
        (lambda model, ids: model.embed(ids * 2), None),
    ],
)
def test_bound(function: Callable[[Indexes, Tensor], Tensor], bound: int | None) -> None:
    captured = pipegraph.capture(Indexes(function), (torch.zeros(2, 3, dtype=torch.int64),))
    assert index_bound(captured.inputs[0]) == bound
