"""Parts of which the tests build their models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Blocks(nn.Module):
    """Three blocks ``a``, ``b`` and ``c``, for a ``forward`` of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = Block()
        self.b = Block()
        self.c = Block()


class Row(nn.Module):
    """Layers in a list ``layers``, for a ``forward`` of a subclass, or one after the other."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(*sizes: int) -> Tensor:
    """Random input, always the same."""
    return torch.randn(*(sizes or (3, WIDTH)), generator=torch.Generator().manual_seed(0))


def ints(bound: int, *sizes: int) -> Tensor:
    """Random integers below a bound, always the same."""
    return torch.randint(bound, sizes, generator=torch.Generator().manual_seed(0))
