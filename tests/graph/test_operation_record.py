"""The list of operations that a model runs, without memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pipegraph.graph.export.operation_record import operations_of_model


@pytest.fixture
def view_of_keyword() -> Iterator[None]:
    """An operator that returns a view and takes no positional argument."""
    library = torch.library.Library("record_test", "DEF")
    library.define("same(*, Tensor(a) x) -> Tensor(a)")
    library.impl("same", lambda *, x: x.view(x.shape), "CompositeExplicitAutograd")
    yield
    library._destroy()


@pytest.mark.usefixtures("view_of_keyword")
def test_a_view_of_a_keyword_argument_is_an_operation() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.record_test.same(x=x.tanh())

    ran = operations_of_model(Views(), {}, (torch.ones(2),), {})
    assert [str(operator) for operator, _ in ran] == ["aten.tanh.default", "record_test.same.default"]
