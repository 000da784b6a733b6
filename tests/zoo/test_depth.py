"""A deeper model takes hardly more source: layers are loops, whatever their number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.codegen.package_files import generate


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Deep(nn.Module):
    """An embedding, layers and a head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer(8) for _ in range(depth))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def lines(depth: int) -> int:
    """Lines of source of a model of ``depth`` layers in eight stages."""
    captured = pipegraph.capture(Deep(depth), (torch.zeros(2, 3, dtype=torch.int64),))
    files = generate(pipegraph.plan(captured, stages=8, balance="uniform"), weights=False).files
    return sum(len(text.splitlines()) for text in files.values())


@pytest.mark.slow
def test_126_layers_take_a_fifth_more_lines_than_32_at_most() -> None:
    assert lines(126) <= 1.2 * lines(32)
