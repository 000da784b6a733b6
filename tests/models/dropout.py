"""Dropout, which ``.eval()`` on a stage has to switch off."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.5)) for _ in range(4)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(nn.functional.dropout(x, 0.1, self.training))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Dropout()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


_generator = torch.Generator().manual_seed(0)
example_inputs = (torch.randn(4, 16, generator=_generator),)
example_target = torch.randn(4, 2, generator=_generator)
