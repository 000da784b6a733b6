"""The table of operators: each name once, each spelling known."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx

from pipegraph.codegen.expressions.operator_spellings import spelling_function
from pipegraph.graph.operators import _ROWS, OPERATORS, Operator, View, operator_of

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
