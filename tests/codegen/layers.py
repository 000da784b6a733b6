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


class Layers(nn.Module):
    """Two blocks and a linear layer; ``middle`` is for subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.b = Block()
        self.c = nn.Linear(8, 8)

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self.a(x)))


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
