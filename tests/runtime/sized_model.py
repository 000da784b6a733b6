"""A model with a dynamic batch and length, and its steps, compared with those of a pipeline."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import pipegraph
from pipegraph import Pipeline
from tests.equal_work import equal_work_shared

LENGTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1]).tril()
        positions = torch.arange(x.shape[1]).view(1, -1, 1) / 10
        return x + self.out((mask @ self.mix(x + positions)).relu()) * table


class Model(nn.Module):
    """Takes a batch, the same batch with it at dimension 1, and a table without it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 3)

    def forward(self, x: Tensor, bias: Tensor, table: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, table)
        return self.head(x + bias.transpose(0, 1))


def inputs(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + 100 * length)
    return torch.randn(rows, length, 8), torch.randn(length, rows, 8), torch.rand(8)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def write(folder: Path, weights: bool = True) -> Path:
    torch.manual_seed(0)
    with equal_work_shared():
        captured = pipegraph.capture(Model(), inputs(2, LENGTH))
    plan = pipegraph.plan(captured, points=["layers.1", "layers.2", "head"])
    return pipegraph.write_package(plan, folder / "package", weights=weights).path


def assert_is_the_step_of_the_model(pipe: Pipeline, rows: int, length: int, microbatches: int | None = None) -> None:
    torch.manual_seed(0)
    model, x = Model(), inputs(rows, length)
    target = torch.randn(rows, length, 3)
    expected = loss(model(*x), target)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    result = pipe.step(*x, target=target, microbatches=microbatches)
    torch.testing.assert_close(result.loss, expected.detach())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
        parameter.grad = None
    outputs = pipe.eval(*x, microbatches=microbatches)
    if outputs is not None:
        torch.testing.assert_close(outputs, model(*x))
