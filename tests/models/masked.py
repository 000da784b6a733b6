"""An integer padding mask becomes a boolean one in the first layers and is used by every layer after."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 31


class Masked(nn.Module):
    def __init__(self, dim: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
        h = self.embed(tokens)
        for layer in self.layers:
            h = h + F.gelu(layer(h)).masked_fill(padding[..., None], 0.0)
        return self.head(h)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Masked()


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


_generator = torch.Generator().manual_seed(0)
example_inputs = (torch.randint(VOCABULARY, (2, 6), generator=_generator), torch.tensor([6, 4]))
example_target = torch.randint(VOCABULARY, (2, 6), generator=_generator)
