"""Numbers that the model's source reads from attributes are attributes in the package, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from tests.codegen.layers import Row, batch
from tests.codegen.parity import differences, source, split

pytestmark = pytest.mark.usefixtures("from_graph")


def halves(x: Tensor) -> Tensor:
    """A function with a whole number in its code."""
    return x[..., :4] * x[..., 4:].exp().clamp(max=6)


class Scaled(nn.Module):
    """Reads numbers in all the ways that models do."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.width, self.heads, self.eps, self.number = 8, 4, 1e-3, number
        self.one = 1
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.heads, self.width // self.heads)
        h = self.linear(x).view(shape).transpose(1, 2) * self.width**-0.5
        x = x + h.transpose(1, 2).flatten(2) / (self.eps + 1)
        y = halves(x) * 3 + self.one  # the number of a layer may be 3
        return torch.cat([y, y + self.eps], dim=-1) * (1 + 0 * self.number)


def written(folder: Path) -> str:
    return (folder / "package" / "blocks.py").read_text(encoding="utf-8")


def test_numbers_of_attributes_keep_their_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Row([Scaled(3), Scaled(4)]), batch(2, 5, 8)
    package = split(tmp_path, model, (x,))
    text = written(tmp_path)
    assert "* self.width**-0.5" in text
    assert "/ (self.eps + 1)" in text
    assert "y + self.eps" in text
    assert "        self.eps = 0.001\n" in text
    assert differences(package, model, (x,), train=True) == []


def test_a_number_that_is_no_attribute_stays_a_number(tmp_path: Path) -> None:
    split(tmp_path, Row([Scaled(3), Scaled(3)]), (batch(2, 5, 8),))
    text = written(tmp_path)
    assert "x[..., :4]" in text  # in a function, where 4 is not the number of heads
    assert "* 3" in text
    assert "self.number" not in text


class Dilated(nn.Module):
    """Convolves with another dilation in each layer."""

    def __init__(self, dilation: int, is_last: bool) -> None:
        super().__init__()
        self.dilation, self.is_last = dilation, is_last
        self.weight = nn.Parameter(torch.randn(8, 4, 2))
        self.residual = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        signal, gate = F.conv1d(F.pad(x, (self.dilation, 0)), self.weight, dilation=self.dilation).chunk(2, dim=1)
        return signal * gate.sigmoid() if self.is_last else x + self.residual(signal * gate.sigmoid())


def test_a_number_is_that_of_the_function_to_which_the_source_gives_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Row([Dilated(2, False), Dilated(3, False), Dilated(4, True)]), batch(3, 4, 16)
    package = split(tmp_path, model, (x,))
    text = written(tmp_path)
    assert text.count("\nclass ") == 2
    assert "def __init__(self, dilation):" in text
    assert "F.pad(x, [self.dilation, 0])" in text
    assert "dilation=[self.dilation]" in text
    assert ".chunk(2, dim=1)" in text
    assert differences(package, model, (x,), train=True) == []


class Heads(nn.Module):
    """Divides a size of its input by an attribute, in all places where a tensor is given a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.qkv, self.gate = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        gate = self.gate(x).view(b, t, self.heads, c // self.heads).transpose(1, 2)
        y = (q * k + v * gate).transpose(1, 2).flatten(2)
        weights = y.transpose(1, 2).reshape(b * self.heads, c // self.heads, t).softmax(1)
        return x + y * weights.view(b, c, t).transpose(1, 2)


def test_of_a_dimension_that_is_split_the_quotient_is_left_open(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Row([Heads(), Heads()]), batch(2, 5, 32)
    package = split(tmp_path, model, (x,))
    text = written(tmp_path)
    assert "self.qkv(x).unflatten(-1, (3, self.heads, -1))" in text
    assert "self.gate(x).unflatten(-1, (self.heads, -1))" in text
    assert ".reshape(-1, 8, x.shape[1])" in text
    assert differences(package, model, (x,), train=True) == []


class TwoHeads(nn.Module):
    """Leaves the number of heads open, which equals the size of another dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 8
        self.key = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        key = self.key(x).view(shape).transpose(1, 2)
        return x + key.softmax(-1).transpose(1, 2).flatten(2).repeat(1, 1, 2)


def test_a_size_that_the_source_leaves_open_stays_open(tmp_path: Path) -> None:
    """Tensor parallelism divides it. The line itself names no attribute."""
    torch.manual_seed(0)
    model, x = Row([TwoHeads(), TwoHeads()]), batch(2, 5, 32)
    package = split(tmp_path, model, (x,))
    assert "self.key(x).unflatten(-1, (-1, 8))" in written(tmp_path)
    assert differences(package, model, (x,), train=True) == []


class Transposed(nn.Module):
    """Its attributes have the values 4 and 3, which are also indices of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = 4, 3
        self.linear = nn.Linear(24, 72)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.linear(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        h = (q * k + v).transpose(3, 1).reshape(rows, self.width * 2, self.heads, length)
        return x + h.permute(0, 3, 2, 1).reshape(rows, length, -1)


def test_a_dimension_is_no_number_of_an_attribute(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Row([Transposed(), Transposed()]), batch(2, 7, 24)
    package = split(tmp_path, model, (x,))
    text = written(tmp_path)
    assert ".permute(2, 0, 3, 1, 4)" in text
    assert ".transpose(3, 1)" in text
    assert ".permute(0, 3, 2, 1)" in text
    assert "self.heads" in text
    assert differences(package, model, (x,), train=True) == []


class Squeezes(nn.Module):
    """After Glow's: its width and height may be as large as a dimension's number."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 3, 1), nn.Conv2d(12, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        rows, channels, height, width = x.shape
        x = x.view(rows, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
        return self.head(x.reshape(rows, channels * 4, height // 2, width // 2))


def test_a_dimension_is_not_taken_for_a_size(tmp_path: Path) -> None:
    model, x = Squeezes(), batch(3, 3, 6, 6)
    captured = pipegraph.capture(model, (x,), dynamic_shapes=False)
    package = pipegraph.write_package(pipegraph.plan(captured, points=["head"]), tmp_path / "package")
    assert ".flatten(1, 3)" in source(package)
    assert differences(package, model, (x,)) == []


class Average(nn.Module):
    """A running average of the rows, whose numbers follow from attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.eps = 0.9, 1e-3
        self.register_buffer("mean", torch.zeros(5, 8))
        self.gain = nn.Parameter(torch.full((8,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(self.decay).add_(x.detach().mean(0), alpha=1 - self.decay)
        return (x - self.mean) * self.gain / (8 + 5 * self.eps)


def test_numbers_that_follow_from_attributes_are_written_so(tmp_path: Path) -> None:
    model, x = Row([Average(), Average()]), batch(4, 5, 8)
    package = split(tmp_path, model, (x,))
    text = written(tmp_path)
    assert "self.mean.mul_(self.decay)" in text and "alpha=1 - self.decay)" in text
    assert "/ (8 + 5 * self.eps)" in text
    assert "torch.full((8,), 0.3)" in text  # and not 0.30000001192092896, which is the same in float32
    assert differences(package, model, (x,), train=True) == []


class ScaledByDefault(nn.Module):
    """Assigns two attributes at once, and computes one from the default of an argument."""

    def __init__(self, width: int, factor: float = 8, scale: float = 32) -> None:
        super().__init__()
        self.scale, self.heads = factor**-0.5, 2
        self.bias = scale**-0.5
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale + self.bias).unflatten(-1, (self.heads, -1)).flatten(-2)


def test_a_number_is_computed_from_a_default(tmp_path: Path) -> None:
    model, x = Row([ScaledByDefault(8), ScaledByDefault(8, scale=16.0)]), batch(2, 5, 8)
    package = split(tmp_path, model, (x,))
    text = written(tmp_path)
    assert "self.scale = 8**-0.5\n" in text
    assert "self.bias = bias\n" in text  # the classes are one: their numbers are arguments
    assert differences(package, model, (x,), train=True) == []
