"""Which numbers may index a tensor, and how many positions a table has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import CaptureError
from pipegraph.graph.index_bounds import index_bound
from tests.messages import refused


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


class Positions(nn.Module):
    """Tokens and their positions, each with a table."""

    def __init__(self, function: Callable[[Positions, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(11, 4), nn.Embedding(20, 4)
        self.function = function

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.function(self, ids)


LENGTHS = [
    (lambda model, ids: model.positions(torch.arange(ids.shape[1])), 20),
    (lambda model, ids: model.positions(torch.arange(ids.shape[1])[None].expand(len(ids), -1)), 20),
    (lambda model, ids: model.positions(torch.arange(0, ids.shape[1], dtype=torch.int32) + 2), 18),
    (lambda model, ids: model.positions(torch.arange(3, 3 + ids.shape[1])), 17),
    (lambda model, ids: model.positions(torch.arange(0, 2 * ids.shape[1], 1))[::2], 10),
    (lambda model, ids: model.positions.weight[torch.arange(ids.shape[1])], 20),
    (lambda model, ids: model.positions.weight.index_select(0, torch.arange(ids.shape[1])), 20),
    (lambda model, ids: model.positions(torch.arange(ids.shape[1]) % 20), None),
    (lambda model, ids: model.positions(torch.arange(ids.shape[1]).clamp(max=19)), None),
    (lambda model, ids: model.positions(torch.arange(0, 2 * ids.shape[1], 2) // 8), None),
    (lambda model, ids: model.positions(ids), None),
]
"""(positions of ids, the largest length)"""


@pytest.mark.parametrize(("function", "longest"), LENGTHS)
def test_a_range_may_be_as_long_as_its_table(
    function: Callable[[Positions, Tensor], Tensor], longest: int | None
) -> None:
    captured = pipegraph.capture(Positions(function), (torch.zeros(2, 6, dtype=torch.int64),))
    assert captured.sizes.highest.get("ids_1") == longest


@pytest.mark.parametrize(("dynamic_shapes", "advice"), [(None, "ids_1 of at most 18"), (False, "smaller sizes")])
def test_a_range_longer_than_its_table_is_refused(dynamic_shapes: object, advice: str) -> None:
    model = Positions(lambda model, ids: model.positions(torch.arange(ids.shape[1]) + 2))
    with refused(CaptureError, "row 20", "20 rows", "test_index_bounds.py:", advice=advice):
        pipegraph.capture(model, (torch.zeros(2, 19, dtype=torch.int64),), dynamic_shapes=dynamic_shapes)
