"""How large the integers of an input may be: the size of the smallest thing that they index."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.graph.operators import index_bound


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
