"""Parameters that a model reaches by other ways than attributes of modules, and memory that several of them share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipegraph
from pipegraph.errors import CaptureError
from tests.messages import refused

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Reads(nn.Module):
    """Computes `read()` of a matrix that `hold` keeps in some way."""

    def __init__(self, hold: Callable[[Reads], Callable[[], Tensor]]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(8, 8))
        self.read = hold(self)

    def forward(self, x: Tensor) -> Tensor:
        self.table.add_(0.1)
        return self.last(torch.tanh(self.first(x) @ self.read()))


def in_list(model: Reads) -> Callable[[], Tensor]:
    model.weights = [model.first.weight]
    return lambda: model.weights[0]


def nested(model: Reads) -> Callable[[], Tensor]:
    model.weights = {"all": [(model.first.weight, model.last.weight)]}
    return lambda: model.weights["all"][0][0]


def in_closure(model: Reads) -> Callable[[], Tensor]:
    weight = model.first.weight
    return lambda: weight.t()


def in_partial(model: Reads) -> Callable[[], Tensor]:
    return functools.partial(torch.mul, model.first.weight, 2.0)


def in_torch_list(model: Reads) -> Callable[[], Tensor]:
    weights = [model.first.weight, model.last.weight]
    return lambda: torch.stack(weights).sum(0)


def buffer_in_list(model: Reads) -> Callable[[], Tensor]:
    tables = [model.table]
    return lambda: tables[0]


def build(hold: Any) -> Reads:
    torch.manual_seed(0)
    return Reads(hold)


def train(model: nn.Module, package: Path, steps: int = 3) -> None:
    """Compare steps of a pipeline with those of the model."""
    pipe = pipegraph.Pipeline(package, kernels="autograd", loss_fn=F.mse_loss)
    optimizers = [torch.optim.SGD(owner.parameters(), 0.1) for owner in (pipe, model)]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = F.mse_loss(model(X), torch.ones(4, 8))
        expected.backward()
        torch.testing.assert_close(pipe.step(X, target=torch.ones(4, 8)).loss, expected.detach())
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("hold", [in_list, nested, in_closure, in_partial, in_torch_list, buffer_in_list])
def test_parameters_outside_of_modules_are_trained(hold: Any, tmp_path: Path) -> None:
    captured = pipegraph.capture(build(hold), (X,))
    train(build(hold), pipegraph.write_package(pipegraph.plan(captured, points=["last"]), tmp_path / "out").path)


@pytest.mark.parametrize(
    "alias",
    [
        lambda weight: weight.data,
        lambda weight: weight.detach(),
        lambda weight: weight.detach().view(-1),
        lambda weight: weight.detach()[:4],
    ],
)
def test_other_tensors_with_the_memory_of_a_parameter_are_refused(alias: Callable[[Tensor], Tensor]) -> None:
    def hold(model: Reads) -> Callable[[], Tensor]:
        memory = alias(model.first.weight)
        return lambda: memory.reshape(-1, 8).mean(0, keepdim=True).expand(8, 8)

    with refused(CaptureError, "memory of the parameter first.weight", advice=".clone()"):
        pipegraph.capture(build(hold), (X,))


class Tied(nn.Module):
    def __init__(self, tie: Callable[[nn.Embedding, nn.Linear], object]) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        tie(self.embed, self.head)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x @ self.embed.weight)))


def one_object(embed: nn.Embedding, head: nn.Linear) -> None:
    head.weight = embed.weight


def one_storage(embed: nn.Embedding, head: nn.Linear) -> None:
    head.weight = nn.Parameter(embed.weight)


def one_data(embed: nn.Embedding, head: nn.Linear) -> None:
    head.weight.data = embed.weight.data


@pytest.mark.parametrize("tie", [one_object, one_storage, one_data])
def test_one_memory_is_one_weight(tie: Any, tmp_path: Path) -> None:
    """Under SGD two parameters of one memory are what one is."""
    torch.manual_seed(0)
    model = Tied(tie)
    package = pipegraph.write_package(
        pipegraph.plan(pipegraph.capture(model, (X,)), points=["layer"]), tmp_path / "out"
    )
    assert package.manifest.tied == (("embed.weight", "head.weight"),)
    train(model, package.path)


def test_parts_of_one_memory_are_weights_of_their_own(tmp_path: Path) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.linspace(-1, 1, 136)
            self.one, self.two = nn.Parameter(flat[:64].view(8, 8)), nn.Parameter(flat[64:128].view(8, 8))
            self.last = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(x @ self.one @ self.two))

    torch.manual_seed(0)
    model = Flat()
    captured = pipegraph.capture(copy.deepcopy(model), (X,))
    package = pipegraph.write_package(pipegraph.plan(captured, points=["last"]), tmp_path / "out")
    assert package.manifest.tied == ()
    train(model, package.path)


def overlap(model: nn.Module) -> None:
    flat = torch.zeros(80)
    model.one, model.two = nn.Parameter(flat[:64].view(8, 8)), nn.Parameter(flat[60:68])


def transposed(model: nn.Module) -> None:
    model.one = nn.Parameter(torch.zeros(8, 8))
    model.two = nn.Parameter(model.one.detach().t())


def buffer_of_parameter(model: nn.Module) -> None:
    model.one = nn.Parameter(torch.zeros(8, 8))
    model.register_buffer("two", model.one.data)


def one_is_frozen(model: nn.Module) -> None:
    model.one = nn.Parameter(torch.zeros(8, 8))
    model.two = nn.Parameter(model.one.detach(), requires_grad=False)


@pytest.mark.parametrize("share", [overlap, transposed, buffer_of_parameter, one_is_frozen])
def test_memory_that_is_shared_otherwise_is_refused(share: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    share(model)
    with refused(CaptureError, "one and", "two share", advice=".clone()"):
        pipegraph.capture(model, (X,))
