"""A model for tests of precision, its unsplit step in each, and training on it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import init_device_mesh

import pipegraph
from pipegraph.runtime.pipeline import Pipeline
from tests.runtime.pipelines import pipeline

WIDTH, MICROBATCHES, ROWS = 8, 4, 4


class Layer(nn.Module):
    """Computes its norm in float32, whatever the model's dtype is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x + self.down(F.silu(self.up(normed * self.scale + self.shift)))


class Model(nn.Module):
    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if has_norm else nn.Identity()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def model(has_norm: bool = True) -> Model:
    torch.manual_seed(0)
    return Model(has_norm)


def write_package(folder: Path, stages: int = 2, has_norm: bool = True) -> Path:
    captured = pipegraph.capture(model(has_norm), (torch.randn(ROWS, WIDTH),))
    return pipegraph.write_package(pipegraph.plan(captured, stages=stages, balance="uniform"), folder).path


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pair = torch.randn(2, MICROBATCHES * ROWS, WIDTH, generator=generator)
    return pair[0], pair[1]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


def reference_step(precision: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The loss, gradients and statistics of the unsplit model: gradients of microbatches are added up in float32."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-true": torch.bfloat16, "fp32": torch.float32}
    computed, dtype = copy.deepcopy(model()).to(dtypes[precision]), dtypes[precision]
    if not precision.endswith("-true"):
        computed.norm.float()
    gradients = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in computed.named_parameters()}
    x, target = batch()
    losses = []
    for rows, aims in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        losses.append(loss(computed(rows.to(dtype)), aims))
        computed.zero_grad()
        (losses[-1] / MICROBATCHES).backward()
        for name, parameter in computed.named_parameters():
            assert parameter.grad is not None
            gradients[name] += parameter.grad.float()
    statistics = {name: buffer for name, buffer in computed.state_dict().items() if "running" in name}
    return torch.stack(losses).mean().detach(), gradients, statistics


def start(package: Path | str, precision: str | None, schedule: str = "1f1b", **options: Any) -> Pipeline:
    options = {"kernels": "eager", "loss_fn": loss, "microbatches": MICROBATCHES, **options}
    return pipeline(package, schedule, precision=precision, **options)


def train(pipe: Pipeline, steps: int = 3, rows: slice = slice(None)) -> list[float | None]:
    """The loss of each step, on ranks that know it."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        x, target = batch()
        step_loss = pipe.step(x[rows], target=target[rows]).loss
        losses.append(None if step_loss is None else step_loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_rank(rank: int, package: str, precision: str, shape: dict[str, int]) -> list[float | None]:
    """What one of several processes says of training; data-parallel ranks take their rows."""
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    count = shape.get("dp_shard", 1)
    place = mesh.get_local_rank("dp_shard") if count > 1 else 0
    rank_rows = MICROBATCHES * ROWS // count
    pipe = start(package, precision, "gpipe" if count > 1 else "1f1b", mesh=mesh, microbatches=MICROBATCHES // count)
    return train(pipe, rows=slice(place * rank_rows, (place + 1) * rank_rows))
