"""Models with custom backwards are trained as the unsplit model is, on all kernels and schedules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import BatchError
from pipegraph.package import Package
from tests.messages import refused, warned
from tests.models.custom_functions import Balanced, BatchBalanced, DomainClassifier, Mixed, Quantizer, WithLoss, stack


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def split(model: nn.Module, x: Tensor, folder: Path) -> Package:
    return pipegraph.write_package(pipegraph.plan(pipegraph.capture(model, (x[:2],)), points=["2"]), folder / "out")


def assert_trains(model: nn.Module, package: Package, x: Tensor, schedule: str, count: int, kernels: str) -> None:
    """Loss and all gradients are those of the model on the whole batch."""
    target = torch.randn_like(model(x))
    loss = mean_square(model(x), target)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    pipe = pipegraph.Pipeline(package, schedule, count, loss_fn=mean_square, kernels=kernels)
    torch.testing.assert_close(pipe.step(x, target=target).loss, loss.detach())
    parameters = {name: each for stage in pipe.stages.values() for name, each in stage.named_parameters()}
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(parameters[name].grad, gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", [Quantizer, DomainClassifier, Balanced, Mixed])
def test_a_pipeline_has_the_gradients_of_the_model(kind: type[nn.Module], tmp_path: Path) -> None:
    model, x = stack(kind), torch.randn(8, 5, 8)
    package = split(model, x, tmp_path)
    assert_trains(model, package, x, "1f1b", 1, "eager")
    for schedule in ("1f1b", "zb-h1"):
        assert_trains(model, package, x, schedule, 4, "eager")
    assert_trains(model, package, torch.randn(12, 3, 8), "1f1b", 4, "autograd")


def test_the_backward_is_not_the_derivative(tmp_path: Path) -> None:
    """The derivative of rounding is zero."""
    model, x = stack(Quantizer), torch.randn(8, 5, 8)
    pipe = pipegraph.Pipeline(split(model, x, tmp_path), "1f1b", 4, loss_fn=mean_square, kernels="eager")
    pipe.step(x, target=torch.randn(8, 5, 8))
    gradients = [parameter.grad for stage in pipe.stages.values() for parameter in stage.parameters()]
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)


def test_compiled_kernels(tmp_path: Path) -> None:
    model, x = nn.Sequential(*stack(Quantizer, 1), *stack(Balanced, 1), *stack(Mixed, 1)), torch.randn(8, 5, 8)
    assert_trains(model, split(model, x, tmp_path), x, "zb-h1", 2, "inductor")


@pytest.mark.parametrize(("kind", "operator"), [(BatchBalanced, "BalanceBatch"), (WithLoss, "mean")])
def test_a_loss_of_the_whole_batch_takes_one_microbatch(kind: type[nn.Module], operator: str, tmp_path: Path) -> None:
    model, x = stack(kind), torch.randn(8, 8)
    package = split(model, x, tmp_path)
    assert_trains(model, package, x, "1f1b", 1, "eager")
    pipe = pipegraph.Pipeline(package, "1f1b", 4, loss_fn=mean_square, kernels="eager")
    with refused(BatchError, operator, "custom_functions.py:", advice="microbatches=1"):
        pipe.step(x, target=x)
    pipe.step([*x.chunk(4)], target=[*x.chunk(4)])  # each item of a list is a batch


class TakesLarger(torch.autograd.Function):
    """A backward that asks for values, which no graph can."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 2 if gradient.abs().max() < 100 else gradient


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return TakesLarger.apply(self.linear(x))


def test_a_backward_that_cannot_be_traced_is_left_to_autograd(tmp_path: Path) -> None:
    model, x = stack(Asks), torch.randn(8, 8)
    package = split(model, x, tmp_path)
    with warned("left to autograd", "blocks.py:"):
        assert_trains(model, package, x, "1f1b", 1, "eager")
