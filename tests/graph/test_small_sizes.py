"""Sizes of 1, for which ``torch.export`` takes the branch of larger ones without a word."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).softmax(1)


class Branches(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True) if x.shape[1] > 1 else x)


class CallsOthers(Layer):
    """A result that nothing reads is not a part of the program."""

    def forward(self, x: Tensor) -> Tensor:
        self.linear(x * 3)
        return super().forward(x * 2 if x.shape[0] == 1 else x)


class Refuses(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < 2:
            raise ValueError("a sequence has two elements or more")
        return super().forward(x)


class NeedsChunk(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 if x.shape[1] // 4 else x)


class NeedsElements(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[0] * x.shape[1] > 1 else x


class AddsConstant(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])


class TakesRest(Layer):
    """Slices from a dynamic size to the end, of which export keeps no number."""

    def forward(self, x: Tensor) -> Tensor:
        twice = torch.cat([x, super().forward(x)], 1)
        return twice[:, : x.shape[1]] + self.linear(twice[:, x.shape[1] :])


@pytest.mark.parametrize(
    ("model", "lowest", "conditions"),
    [
        (Layer, {}, ()),
        (TakesRest, {}, ()),
        (Branches, {"x_1": 2}, ()),
        (CallsOthers, {"batch": 2}, ()),
        (Refuses, {"x_1": 2}, ()),
        (NeedsChunk, {"x_1": 2}, ("x_1 // 4 != 0",)),
        (AddsConstant, {}, ()),
        (NeedsElements, {}, ("batch * x_1 != 1",)),
    ],
)
def test_a_size_is_left_out_for_which_the_model_does_something_else(
    model: type[Layer], lowest: dict[str, int], conditions: tuple[str, ...]
) -> None:
    captured = pipegraph.capture(model(), (torch.randn(3, 8, 4),))
    assert (captured.sizes.lowest, captured.sizes.conditions) == (lowest, conditions)


def test_what_torch_refuses_in_training_alone_is_no_limit() -> None:
    """A batch norm takes one row when it is evaluated."""
    captured = pipegraph.capture(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (torch.randn(3, 4),))
    assert (captured.sizes.lowest, captured.sizes.conditions) == ({}, ())


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    state_before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pipegraph.capture(model, (torch.randn(2, 3, 8, 8),))
    state_after = model.state_dict()
    assert all(torch.equal(state_after[name], tensor) for name, tensor in state_before.items())
    assert all(module.training for module in model.modules())


class Windows(nn.Module):
    """Attention within windows, to whole ones of which images are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = F.pad(x, (0, 0, 0, -w % 3, 0, -h % 3))
        rows, columns = x.shape[1] // 3, x.shape[2] // 3
        x = x.view(b, rows, 3, columns, 3, c).permute(0, 1, 3, 2, 4, 5).reshape(b * rows * columns, 9, c)
        q, k, v = self.qkv(x).reshape(x.size(0), 9, 3, 2, 2).permute(2, 0, 3, 1, 4)
        x = (q @ k.mT).softmax(-1).matmul(v).transpose(1, 2).reshape(x.size(0), 9, c)
        x = x.view(b, rows, columns, 3, 3, c).permute(0, 1, 3, 2, 4, 5).reshape(b, rows * 3, columns * 3, c)
        return x[:, :h, :w]


@pytest.mark.slow
def test_what_a_stage_cannot_express_fixes_no_more_sizes_than_are_in_it() -> None:
    """Newer versions of torch ask for less, and fix none of the others either."""
    captured = pipegraph.capture(nn.Sequential(nn.Linear(4, 4), Windows()), (torch.randn(3, 7, 8, 4),))
    assert captured.sizes.captured["batch"] == 3
    assert "input.shape[0]" not in {size.place for size in captured.sizes.fixed}
