"""Control flow that depends on data, which cannot be captured."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:
            return self.second(x)
        return x


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return DataDependent()


example_inputs = (torch.ones(2, 4),)
