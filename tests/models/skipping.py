"""A value and two inputs that are read two stages later, and a weight that the first and the last stage share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 11


class Skipping(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.middle = nn.Linear(dim, dim)
        self.late = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, scale: Tensor, kept: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        h = torch.tanh(self.middle(embedded))
        h = torch.tanh(self.late(h))
        h = self.norm(h) + embedded
        return self.head(h).masked_fill(kept[..., None] == 0, 0.0) * scale


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Skipping()


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


_generator = torch.Generator().manual_seed(0)
example_inputs = (
    torch.randint(VOCABULARY, (2, 5), generator=_generator),
    torch.rand(2, 5, 1, generator=_generator),
    torch.randint(2, (2, 5), generator=_generator),
)
example_target = torch.randint(VOCABULARY, (2, 5), generator=_generator)
