"""A model with a tied head that learns to count, and all that a model file may say of its training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LENGTH, WIDTH, ROWS = 11, 6, 8, 8


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x * self.scale)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Counting()


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def metrics(logits: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"accuracy": (logits.argmax(-1) == target).float().mean()}


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def batch(step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
    starts = torch.randint(WORDS, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    counted = (starts + torch.arange(LENGTH + 1)) % WORDS
    return counted[rank::world, :-1], counted[rank::world, 1:]


class Batches:
    """Without end, from a place that it says."""

    def __init__(self, rank: int, world: int) -> None:
        self.share, self.step = (rank, world), 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            self.step += 1
            yield batch(self.step - 1, *self.share)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def data(rank: int, world: int) -> Batches:
    return Batches(rank, world)


def evaluation_data(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    return [batch(1000 + index, rank, world) for index in range(3)]


example_inputs = (batch(0)[0][:2],)
example_target = batch(0)[1][:2]
