"""An integer mask and a float input that only the last layers read; both go from the caller straight to them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LateInput(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.gate = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, mask: Tensor, condition: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        x = x.masked_fill(mask == 0, 0.0)
        return self.head(x * torch.sigmoid(self.gate(condition)))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return LateInput()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


_generator = torch.Generator().manual_seed(0)
example_inputs = (
    torch.randn(2, 8, generator=_generator),
    torch.randint(2, (2, 8), generator=_generator),
    torch.randn(2, 8, generator=_generator),
)
example_target = torch.randn(2, 3, generator=_generator)
