"""The role of each input: declared, equal by name, or found."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import CaptureError
from tests.messages import refused


class Masked(nn.Module):
    """Reads a mask by the number of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.layer(x) * keep[torch.arange(x.shape[0]), None]


class Looked(nn.Module):
    """Reads a table at the numbers of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, at: Tensor, table: Tensor) -> Tensor:
        return self.layer(x) + table[at]


def roles(captured: pipegraph.Captured) -> dict[str, int | str | None]:
    return {name: role.dim if role.kind == "rows" else role.kind for name, role in captured.batch.roles.items()}


X, KEEP = torch.randn(4, 8), torch.ones(4)


def test_an_input_that_is_read_by_rows_has_rows() -> None:
    captured = pipegraph.capture(Masked(), (X, KEEP))
    assert roles(captured) == {"x": 0, "keep": 0}
    assert list(captured.sizes.captured) == ["batch"]  # both dimensions are one size


def test_a_table_with_as_many_rows_as_the_batch_is_whole() -> None:
    captured = pipegraph.capture(Looked(), (X, torch.randint(4, (4,)), torch.randn(4, 8)))
    assert roles(captured) == {"x": 0, "at": 0, "table": "whole"}
    assert captured.batch.mixing == ()


def test_equal_names_are_one_size() -> None:
    shapes = {"x": {0: "rows"}, "keep": {0: "rows"}}
    captured = pipegraph.capture(Masked(), (X, KEEP), dynamic_shapes=shapes)
    assert roles(captured) == {"x": 0, "keep": 0}
    assert list(captured.sizes.captured) == ["batch"]


def test_equal_names_of_different_sizes_are_refused() -> None:
    shapes = {"x": {0: "batch"}, "at": {0: "batch"}, "table": {0: "batch"}}
    with refused(CaptureError, "table.shape[0] is 6", "batch 4", advice="two names"):
        pipegraph.capture(Looked(), (X, torch.randint(4, (4,)), torch.randn(6, 8)), dynamic_shapes=shapes)


def test_declared_roles_are_proved() -> None:
    captured = pipegraph.capture(Masked(), (X, KEEP), batch_dims={"keep": None})
    assert roles(captured) == {"x": 0, "keep": "whole"}
    assert [mixing.operator for mixing in captured.batch.mixing] == ["index"]


def test_a_declared_dimension_names_the_batch() -> None:
    captured = pipegraph.capture(nn.GRU(6, 4), (torch.randn(3, 5, 6),), batch_dims={"input": 1})
    assert captured.sizes.captured == {"input_0": 3, "batch": 5}
    assert [captured.batch.dims[node] for node in captured.returned] == [1, 1]


def test_one_row_of_a_declared_dimension_varies() -> None:
    captured = pipegraph.capture(nn.GRU(6, 4), (torch.randn(3, 1, 6),), batch_dims={"input": 1})
    assert captured.sizes.captured == {"input_0": 3, "batch": 1}


def test_a_list_may_mix_rows() -> None:
    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.patch = nn.Embedding(20, 8), nn.Linear(12, 8)

        def forward(self, ids: Tensor, patches: Tensor) -> Tensor:
            place = ((ids == 0).flatten().long().cumsum(0) - 1).clamp(min=0) % patches.shape[0]
            images = self.patch(patches)[place].view(*ids.shape, -1)
            return torch.where((ids == 0)[..., None], images, self.embed(ids))

    inputs = torch.randint(20, (4, 5)), torch.randn(7, 12)
    batch = pipegraph.capture(Stream(), inputs).batch
    assert [mixing.operator for mixing in batch.mixing] == ["cumsum"]
    captured = pipegraph.capture(Stream(), inputs, batch_dims={"patches": "list"})
    assert roles(captured) == {"ids": 0, "patches": "list"}
    assert captured.batch.mixing == ()


@dataclass
class Pair:
    image: Tensor
    table: Tensor


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch: dict[str, Tensor], others: tuple[Tensor, Tensor]) -> Tensor:
        return self.layer(batch["image"]) * others[0] + others[1]


NESTED = {"image": torch.randn(3, 8)}, (torch.randn(3, 8), torch.randn(8))


@pytest.mark.parametrize(
    "batch_dims",
    [
        {"batch": 0, "others.0": 0, "others.1": "whole"},
        {"batch": {"image": 0}, "others": (0, None)},
        {"batch_image": 0, "others": [0, "whole"]},
    ],
)
def test_nested_inputs_are_declared_by_path_or_as_they_are_nested(batch_dims: dict[str, object]) -> None:
    captured = pipegraph.capture(Nested(), NESTED, batch_dims=batch_dims)
    assert roles(captured) == {"batch_image": 0, "others_0": 0, "others_1": "whole"}
    assert captured.batch.roles["others_1"].declared


@pytest.mark.parametrize(
    ("batch_dims", "parts", "advice"),
    [
        ({"keeps": 0}, ["'keeps'", '"keep"'], "x, keep"),
        ({"keep": 1}, ["1 for keep", "1 dimensions"], '"whole"'),
        ({"keep": "rows"}, ["'rows' for keep"], '"whole"'),
        ({"keep": True}, ["True for keep"], '"list"'),
        ([0], ["list"], "batch_dims={"),
        ({"target": "whole"}, ["'whole' for the target"], "from 0"),
    ],
)
def test_a_role_that_does_not_fit_is_refused(batch_dims: object, parts: list[str], advice: str) -> None:
    with refused(CaptureError, "batch_dims", *parts, advice=advice):
        pipegraph.capture(Masked(), (X, KEEP), batch_dims=batch_dims)


def test_two_statements_on_one_batch_are_refused() -> None:
    shapes = {"input": {0: "batch", 1: "length"}}
    with refused(CaptureError, "input.shape[0]", "dimension 1", advice="dynamic_shapes"):
        pipegraph.capture(nn.GRU(6, 4), (torch.randn(3, 5, 6),), dynamic_shapes=shapes, batch_dims={"input": 1})
