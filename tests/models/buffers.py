"""Buffers of every kind: persistent, not persistent, shared by layers, and a table with other values in each layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    mask: Tensor
    scale: Tensor
    table: Tensor

    def __init__(self, width: int, index: int, mask: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("scale", torch.full((width,), 1.0 + index))
        self.register_buffer("table", torch.linspace(0.0, 1.0 + index, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale + self.table).masked_fill(self.mask, 0.0)


class Buffers(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        mask = torch.arange(width) % 4 == 3
        self.layers = nn.ModuleList(Layer(width, index, mask) for index in range(4))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Buffers()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


_generator = torch.Generator().manual_seed(0)
example_inputs = (torch.randn(4, 8, generator=_generator),)
example_target = torch.randn(4, 2, generator=_generator)
