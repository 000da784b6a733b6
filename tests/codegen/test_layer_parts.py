"""Layers of which a stage has a part, and layers that take a Sequential of theirs apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from tests.codegen.layers import Row, batch
from tests.codegen.parity import differences, split, write

pytestmark = pytest.mark.usefixtures("from_graph")


class Edges(nn.Module):
    """Reads rows of an input of the model first, which costs nothing, and begins with a product before it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        return x + self.out((x @ self.weight)[source] - x[target])


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Edges() for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return x


def test_a_part_without_calls_is_said_to_be_one(tmp_path: Path) -> None:
    """And the part that ends a layer is its end, though it reads the layer's first argument."""
    model, inputs = Graph(), (torch.randn(6, 8), torch.randint(6, (2, 6)))
    plan = pipegraph.plan(pipegraph.capture(model, inputs), points=["layers.1.out"])
    assert plan.describe() == ["stage 0: layers.0, part of layers.1", "stage 1: layers.1.out, layers.2"]
    package = write(tmp_path, plan)
    written = (tmp_path / "package" / "blocks.py").read_text(encoding="utf-8")
    assert set(re.findall(r"^class (\w+)", written, re.M)) == {"EdgesStart", "EdgesEnd", "Edges"}
    assert differences(package, model, inputs) == []


class Apart(nn.Module):
    """Takes its Sequential apart, in some layers."""

    def __init__(self, is_scaled: bool) -> None:
        super().__init__()
        self.is_scaled = is_scaled
        self.parts = nn.Sequential(nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.parts[1:](self.parts[0](x) * 2) if self.is_scaled else self.parts(x)
        return x + h


def test_a_layer_does_not_return_what_a_slice_of_its_sequential_returns(tmp_path: Path) -> None:
    model = Row([Apart(number % 2 == 0) for number in range(4)])
    package = split(tmp_path, model, (batch(),), cut="layers.2")
    written = (tmp_path / "package" / "blocks.py").read_text(encoding="utf-8")
    assert re.findall(r"def forward.*", written) == ["def forward(self, x: Tensor) -> Tensor:"] * 2
    assert differences(package, model, (batch(),), train=True) == []
