"""A model that draws random numbers in every way, and training on it for a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import init_device_mesh

import pipegraph
from pipegraph.package import Package
from pipegraph.runtime.pipeline import Pipeline
from tests.runtime.pipelines import pipeline

WIDTH, WORDS, LENGTH, LAYERS, MICROBATCHES = 8, 6, 4, 4, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(query, key, value, dropout_p=0.5 if self.training else 0.0))


class Gate(nn.Module):
    """Too small to be a module of a package: what it draws, the module around it draws there."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full_like(x[:, :1, :1], 0.75))


class Layer(nn.Module):
    """Draws random numbers itself, before and after its inner modules, and in them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.gate, self.dropout = Attention(), Gate(), nn.Dropout(0.5)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(x), 0.5, self.training)
        x = self.gate(x) + 0.1 * torch.randn_like(x)
        hidden = self.dropout(F.gelu(self.up(x)))
        return x + F.dropout(self.down(hidden), 0.5, self.training)


class Body(nn.Module):
    """Is opened for its layers, and draws between them with one module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.between = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5, self.training)
        for layer in self.layers:
            x = self.between(layer(x))
        return F.dropout(x, 0.5, self.training)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(WORDS, WIDTH), Body(), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


CUTS = {
    "one": [],
    "two": ["body.layers.2"],
    "three": ["body.layers.1", "body.layers.3"],
    "four": ["body.layers.1", "body.layers.2", "body.layers.3"],
    "inside": ["body.layers.1.up", "body.layers.2.down", "body.layers.3.attention.out"],
}


def write_packages(folder: Path) -> None:
    """Write the model at all `CUTS`."""
    torch.manual_seed(0)
    captured = pipegraph.capture(Model(), (tokens(2),))
    for name, points in CUTS.items():
        plan = pipegraph.plan(captured, points=points) if points else pipegraph.plan(captured, stages=1)
        pipegraph.write_package(plan, folder / name)


def tokens(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return loss(F.dropout(output, 0.5), target)


def start(package: Package | Path | str, schedule: str = "1f1b", seed: int | None = 7, **options: Any) -> Pipeline:
    options = {"kernels": "eager", "loss_fn": noisy_loss, "microbatches": MICROBATCHES, **options}
    return pipeline(package, schedule, seed=seed, **options)


def train(pipe: Pipeline, steps: int = 3) -> list[float | None]:
    """The loss of each step, on ranks that know it."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        batch = tokens(2 * MICROBATCHES)
        step_loss = pipe.step(batch, target=batch).loss
        losses.append(None if step_loss is None else step_loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_rank(rank: int, package: str, schedule: str, options: dict[str, Any]) -> list[float | None]:
    """What one of several processes says of training."""
    return train(start(package, schedule, **options))


def replicas(rank: int, package: str, dimension: str) -> list[float]:
    """The losses of this data-parallel rank's microbatches, all of the same rows."""
    pipe = start(package, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=(dimension,)))
    batch = tokens(1).expand(MICROBATCHES, -1)
    losses = pipe.step(batch, target=batch, return_losses=True).losses
    assert losses is not None
    return losses.tolist()
