"""Batch norm: running statistics, an integer count of batches, and another result in training than in evaluation."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BatchNorm(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True)) for _ in range(4)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return BatchNorm()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


_generator = torch.Generator().manual_seed(0)
example_inputs = (torch.randn(6, 8, generator=_generator),)
example_target = torch.randn(6, 2, generator=_generator)
