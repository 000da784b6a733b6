"""Hand-written models whose shape is not a chain of equal layers, each with the inputs of one microbatch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import unet

Example = tuple[nn.Module, tuple[Tensor, ...]]


class TwoTowers(nn.Module):
    """Two encoders side by side, over inputs of their own, compared at the end."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.query = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))
        self.document = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        q = self.query(self.words(query)).mean(1)
        d = self.document(self.words(document)).mean(1)
        return self.scale * F.normalize(q, dim=-1) @ F.normalize(d, dim=-1).T


class Experts(nn.Module):
    """A router weighs the experts of each row; every expert sees every row, so that shapes stay fixed."""

    def __init__(self, width: int, count: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(count)
        )
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weights, chosen = scores.topk(self.chosen, dim=-1)
        gates = torch.zeros_like(scores).scatter(-1, chosen, weights)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return x + (outputs * gates.unsqueeze(-2)).sum(-1)


class MixtureOfExperts(nn.Module):
    """A chain of such layers."""

    def __init__(self, width: int = 12, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(width, count=3, chosen=2) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class CalledTwice(nn.Module):
    """One module at both ends: its weights are shared by the stages that call it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        self.between = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        for layer in self.between:
            x = x + layer(x).tanh()
        return self.shared(x)


class Recurrent(nn.Module):
    """A cell stepped through the sequence, below and above a layer that sees it whole."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.encoder = nn.GRUCell(width, width)
        self.mixer = nn.Linear(width, width)
        self.decoder = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], x.shape[2])
        states = []
        for step in x.unbind(1):
            state = self.encoder(step, state)
            states.append(state)
        mixed = self.mixer(torch.stack(states, dim=1)).relu()
        hidden = cell = torch.zeros_like(state)
        for step in mixed.unbind(1):
            hidden, cell = self.decoder(step, (hidden, cell))
        return self.head(hidden)


def _unet() -> Example:
    return unet.UNet(width=8), (torch.randn(2, 3, 16, 16),)


def _two_towers() -> Example:
    return TwoTowers(), (torch.randint(50, (4, 6)), torch.randint(50, (4, 9)))


HANDWRITTEN: dict[str, Callable[[], Example]] = {
    "U-Net": _unet,
    "two towers": _two_towers,
    "mixture of experts": lambda: (MixtureOfExperts(), (torch.randn(6, 12),)),
    "one module called twice": lambda: (CalledTwice(), (torch.randn(4, 16),)),
    "recurrent cell": lambda: (Recurrent(), (torch.randn(3, 5, 12),)),
}
"""What makes each of them."""
