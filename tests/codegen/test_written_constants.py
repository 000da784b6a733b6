"""Tensors that a model's code makes from numbers are written at the place that reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipegraph import Pipeline
from tests.codegen.layers import WIDTH, Block, Row, batch, ints
from tests.codegen.parity import differences, source, split


class Scaled(nn.Module):
    """Divides by a number that is a tensor, as DeBERTa's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sqrt(torch.tensor(WIDTH, dtype=torch.float) * 3)
        return torch.where(x > 0, torch.tensor(0.3), self.linear(x) / scale)


class Last(nn.Module):
    """Takes the last position, and pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(11, WIDTH), Row([Scaled(), Scaled()]), nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.embed(tokens))
        left = torch.tensor([1, 4, 2])
        right = torch.tensor([0, 0, 3])
        x = x + (x[..., left] * x[..., right]).sum(-1, keepdim=True)
        return self.head(x[:, [-1]])


@pytest.mark.usefixtures("from_graph")
def test_numbers_are_written_and_tables_have_their_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = Last(), ints(11, 3, 5)
    package = split(tmp_path, model, (tokens,), cut="body.layers.1")
    text = source(package)
    assert "scale = (torch.full((), 8.0, device=x.device) * 3).sqrt()" in text
    assert "torch.where(x > 0, torch.full((), 0.3, device=x.device), self.linear(x) / scale)" in text
    assert "        return self.head(x[:, [-1]])" in text
    assert "x[:, :, self.left] * x[:, :, self.right]" in text
    assert "self.constant" not in text
    assert {buffer.name for stage in package.manifest.stages for buffer in stage.buffers} == {"left", "right"}
    assert differences(package, model, (tokens,), train=True) == []


@pytest.mark.parametrize("kernels", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_kernels_take_them_at_every_size(kernels: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Last()
    package = split(tmp_path, model, (ints(11, 3, 5),), cut="body.layers.1")
    pipe = Pipeline(package, microbatches=2, kernels=kernels)
    for rows, length in ((4, 5), (4, 6), (4, 7), (6, 9)):
        tokens = ints(11, rows, length)
        torch.testing.assert_close(pipe.eval(tokens), model(tokens).detach())
    assert all(count.symbolic == 1 and not count.autograd for count in pipe.kernels_report())


class Masked(nn.Module):
    """Fills with infinity, and by a flag; what reads the infinity is made by a pass over the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        filled = torch.where(h > 0, h, torch.tensor(float("-inf")))
        weights = torch.where(torch.tensor(True), filled.softmax(-1).nan_to_num(), h)
        weights = weights.clone()
        weights.mul_(torch.tensor(2.0))
        return self.b(weights)


def test_infinities_and_flags_are_written(tmp_path: Path) -> None:
    package = split(tmp_path, model := Masked(), (batch(),), cut="b")
    assert "self.constant" not in source(package)
    assert 'torch.full((), float("-inf"), device=' in source(package)
    assert differences(package, model, (batch(),), train=True) == []


class Named(Row):
    """A constant has the name of a module that is called in the same place."""

    def __init__(self) -> None:
        super().__init__([Block(), Block()])
        self.table = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        return self.table(super().forward(x) * table)


def test_a_table_that_is_called_like_a_module(tmp_path: Path) -> None:
    package = split(tmp_path, model := Named(), (batch(),))
    assert "return x * self.table_1" in source(package)
    assert differences(package, model, (batch(),), train=True) == []
