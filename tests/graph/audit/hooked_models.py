"""A model with hooks of each kind, and its training on several ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.nn import functional as F

import pipegraph
from pipegraph.errors import PipegraphError

ROWS, WIDTH, CLASSES = 8, 8, 3


def clip(gradient: Tensor, limit: float = 0.05) -> Tensor:
    """Scale a gradient, as a hook that is called with a part of it could not."""
    norm = gradient.norm()
    if norm > limit:
        gradient = gradient * (limit / norm)
    return gradient


def masked(mask: Tensor, gradient: Tensor) -> Tensor:
    return gradient * mask


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Hooked(nn.Module):
    """Four blocks and a head of which the first and the last weight are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.act = nn.Tanh()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.limit = 0.01
        self.add_hooks()

    def add_hooks(self) -> None:
        keep = (torch.rand(WIDTH, WIDTH) > 0.5).float()
        blocks: list[Any] = list(self.layers)
        blocks[1].up.weight.register_hook(lambda gradient: gradient * keep)
        blocks[2].up.weight.register_hook(clip)
        blocks[2].up.bias.register_hook(partial(masked, torch.arange(float(WIDTH))))
        blocks[3].up.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0.5))
        self.head.weight.register_hook(
            lambda gradient: torch.clamp(gradient, -self.limit, self.limit) + 0.1 * self.head.weight.detach().sign()
        )
        for block in blocks:
            block.norm.bias.register_hook(lambda g, scale=self.limit: F.normalize(g, dim=0) * scale)
        self.first.weight.register_hook(clip)
        blocks[0].up.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.25,))
        blocks[2].norm.register_full_backward_pre_hook(lambda module, outputs: (outputs[0].clamp(-1e-3, 1e-3),))
        blocks[3].register_full_backward_hook(lambda module, inputs, outputs: (-inputs[0],))
        self.act.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.act(self.last(x)))


def build_model() -> Hooked:
    torch.manual_seed(0)
    return Hooked()


def batch(rows: int = ROWS, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.arange(rows) % CLASSES


def expected_gradients(*batches: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Those of the unsplit model, each batch whole."""
    model = build_model()
    for x, target in batches:
        F.cross_entropy(model(x), target).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def train_on_ranks(rank: int, folder: str, shape: dict[str, int]) -> list[str]:
    """The names of gradients that differ from those of the unsplit model on the batch of all ranks; or the error."""
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    options: dict[str, Any] = {"tp_plan": {"head": "colwise_gather_output"}} if "tp" in shape else {}
    try:
        pipe = pipegraph.Pipeline(
            Path(folder),
            schedule="1f1b" if shape["pp"] > 1 else "interleaved-1f1b",
            microbatches=2,
            kernels="eager",
            loss_fn=F.cross_entropy,
            mesh=mesh,
            timeout=60,
            **options,
        )
        x, target = batch()
        replicas = shape.get("dp_replicate", 1)
        part = mesh.get_local_rank("dp_replicate") if replicas > 1 else 0
        rows = slice(part * ROWS // replicas, (part + 1) * ROWS // replicas)
        pipe.step(x[rows], target=target[rows])
    except PipegraphError as error:
        return [str(error)]
    expected = expected_gradients((x, target))
    return [
        name
        for stage in pipe.stages.values()
        for name, parameter in stage.named_parameters()
        if not torch.allclose(parameter.grad, expected[name.replace("last.", "first.")], atol=1e-6)  # type: ignore[arg-type]
    ]
