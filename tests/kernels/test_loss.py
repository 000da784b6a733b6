"""The loss as the last segment: what it may be, and what it may hold."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.errors import PipegraphError
from pipegraph.kernels import make
from tests.kernels.stages import Layers, step, x
from tests.messages import refused, warned


def test_the_loss_is_a_segment() -> None:
    stage = Layers()
    kernels = make("eager", stage, (True,), (True,), lambda outputs, target: F.cross_entropy(outputs[0], target["y"]))
    target = {"y": torch.tensor([0, 1, 2, 3])}
    forward = kernels.forward((x,), target=target, with_loss=True)
    leaf = x.clone().requires_grad_()
    loss = F.cross_entropy(stage(leaf), target["y"])
    assert_close(forward.loss, loss.detach())
    expected = torch.autograd.grad(loss / 2, [leaf, *stage.parameters()])
    (input_gradient,) = kernels.input_backward(forward.saved, (None, torch.tensor(0.5)))
    kernels.weight_backward(forward.saved)
    assert_close([input_gradient, *(parameter.grad for parameter in stage.parameters())], list(expected))
    assert kernels.forward((x,)).loss is None


@pytest.mark.parametrize(
    ("loss", "parts", "advice"),
    [
        (lambda outputs, target: outputs[0], ["shape [4, 4]"], "mean"),
        (lambda outputs, target: outputs[0].detach().sum(), ["without a gradient"], "without detach()"),
        (lambda outputs, target: outputs[0].sum().item(), ["float"], "without .item()"),
        (lambda outputs, target: None, ["nothing"], "return loss"),
        (lambda outputs, target: outputs[0].sum() + 1j, ["complex"], "real part"),
        (None, ["none"], "Pipeline(…, loss_fn=…)"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, parts: list[str], advice: str) -> None:
    with refused(PipegraphError, "loss", *parts, advice=advice):
        make("eager", Layers(), (True,), (True,), loss).forward((x,), target=None, with_loss=True)


class Scaled(nn.Module):
    """A loss with a parameter, and a buffer that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("average", torch.zeros(()))

    def forward(self, output: Tensor, target: Any) -> Tensor:
        loss = self.scale * output.square().mean()
        self.average.mul_(0.5).add_(loss.detach())
        return loss / (1 + self.average)


@pytest.mark.parametrize("held", ["in a closure", "in an attribute", "in a list", "in an object", "itself"])
def test_a_loss_that_is_a_module(held: str) -> None:
    stage, loss = nn.Linear(8, 8), Scaled()
    plain_stage, reference = copy.deepcopy(stage), copy.deepcopy(loss)
    loss.holder = loss if held == "in an attribute" else None  # a module that holds itself
    hidden, namespace = nn.Module(), SimpleNamespace(criterion=loss)
    hidden.criteria = [loss]
    functions: dict[str, Any] = {
        "itself": loss,
        "in a list": lambda outputs, target: hidden.criteria[0](outputs[0], target),
        "in an object": lambda outputs, target: namespace.criterion(outputs[0], target),
    }
    if held == "itself":
        loss.forward = lambda outputs, target: Scaled.forward(loss, outputs[0], target)  # type: ignore[method-assign]
    function = functions.get(held, lambda outputs, target: loss(outputs[0], target))
    kernels = make("eager", stage, (False,), (True,), function)
    plain = make("autograd", plain_stage, (False,), (True,), lambda outputs, target: reference(outputs[0], target))
    for value in (1.0, 1.0, 5.0):
        with torch.no_grad():
            loss.scale.fill_(value)
            reference.scale.fill_(value)
        assert_close(step(kernels), step(plain))
    assert_close(loss.scale.grad, reference.scale.grad)
    assert_close(loss.average, reference.average)
    assert_close(stage.weight.grad, plain_stage.weight.grad)
    assert None not in kernels.variants  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["eager", "inductor"])
def test_a_tensor_that_a_loss_holds_is_read_at_each_step(name: str) -> None:
    weights = [torch.ones(()), torch.ones(8)]
    stage = nn.Linear(8, 8)
    kernels = make(name, stage, (True,), (True,), lambda outputs, target: (outputs[0] * weights[0] * weights[1]).sum())
    for value in (1.0, 3.0):
        for weight in weights:
            weight.fill_(value)
        stage.zero_grad()
        assert_close(step(kernels), (stage(x) * value**2).sum().detach())
        assert_close(stage.bias.grad, torch.full((8,), 4 * value**2))


def test_a_tensor_that_requires_a_gradient_is_left_to_autograd() -> None:
    weight = torch.ones(8, requires_grad=True)
    kernels = make("eager", nn.Linear(8, 8), (True,), (True,), lambda outputs, target: (outputs[0] * weight).sum())
    with warned("shape [8]", "requires a gradient"):
        step(kernels)
    assert weight.grad is not None


def test_a_tensor_that_is_written_to_is_left_to_autograd() -> None:
    average = torch.zeros(())

    def loss(outputs: Any, target: Any) -> Tensor:
        total = outputs[0].sum()
        average.add_(total.detach())
        return total

    kernels = make("eager", nn.Linear(8, 8), (True,), (True,), loss)
    with warned("cannot be traced", "test_loss.py:", "average.add_"):
        total_loss = sum(step(kernels) for _ in range(3))
    assert_close(average, total_loss)


def test_a_loss_that_keeps_what_it_found() -> None:
    recorded_losses: list[Tensor] = []

    def loss(outputs: Any, target: Any) -> Tensor:
        recorded_losses.append(outputs[0].sum())
        return recorded_losses[-1]

    kernels = make("eager", nn.Linear(8, 8), (True,), (True,), loss)
    with pytest.warns(UserWarning, match="sets a list"):
        losses = [step(kernels) for _ in range(3)]
    assert_close(recorded_losses, losses)


LOGGER = logging.getLogger("a loss")


def logged(outputs: tuple[Tensor, ...], target: Any) -> Tensor:
    if LOGGER.isEnabledFor(logging.DEBUG):
        LOGGER.debug("a message")
    return outputs[0].square().mean()


def test_a_loss_that_logs_is_traced(recwarn: pytest.WarningsRecorder) -> None:
    LOGGER._cache.clear()  # type: ignore[attr-defined]
    kernels = make("eager", Layers(), (True,), (True,), logged)
    assert kernels.forward((x,), target=None, with_loss=True).loss is not None
    assert not recwarn.list


def test_what_is_wrong_with_a_loss_is_not_announced_as_tracing() -> None:
    kernels = make("eager", nn.Linear(8, 8), (True,), (True,), lambda outputs, target: F.mse_loss(outputs[0] @ x, x))
    with TestCase().assertNoLogs(level=logging.DEBUG), pytest.raises(RuntimeError, match="cannot be multiplied"):
        step(kernels)  # where a warning would be an error


class Weight:
    """Makes its tensor when it is first asked for it."""

    kept: Tensor | None = None  # of the class

    def __init__(self) -> None:
        self.made: Tensor | None = None

    def get(self) -> Tensor:
        if self.made is None:
            self.made = torch.full((), 2.0)
        return self.made

    def of_class(self) -> Tensor:
        if Weight.kept is None:
            Weight.kept = torch.full((), 2.0)
        return Weight.kept


class Criterion:
    def __call__(self, outputs: Any, target: Any) -> Tensor:
        return outputs[0].square().mean() * self.weight()


class Weighted(Criterion):
    """Inherits what calls a method that reads an object that makes a tensor."""

    def __init__(self) -> None:
        self.held = Weight()

    def weight(self) -> Tensor:
        return self.held.get()


CACHE: dict[str, Tensor] = {}


def keeping(outputs: Any, target: Any) -> Tensor:
    if "weight" not in CACHE:
        CACHE["weight"] = torch.full((), 2.0)
    return outputs[0].square().mean() * CACHE["weight"]


_weight: Tensor | None = None


def rebinding(outputs: Any, target: Any) -> Tensor:
    global _weight
    if _weight is None:
        _weight = torch.full((), 2.0)
    return outputs[0].square().mean() * _weight


def scaling() -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    return lambda outputs, target: scaler.scale(outputs[0].square().mean())


@pytest.mark.parametrize(
    "loss", [Weighted(), keeping, rebinding, scaling()], ids=["an object", "a dict", "a global", "a GradScaler"]
)
def test_a_tensor_that_a_loss_makes_at_its_first_call_is_real(loss: Any, recwarn: pytest.WarningsRecorder) -> None:
    stage = nn.Linear(8, 8)
    kernels: Any = make("eager", stage, (True,), (True,), loss)
    kernels.prepare([x], target=None, with_loss=True, differentiable=True, kinds="FIW")
    expected = 2 * stage(x).square().mean()
    for _ in range(3):
        kernels.begin()
        forward = kernels.forward((x,), with_loss=True)
        assert_close(forward.loss, expected.detach())
        kernels.backward(forward.saved, (None, torch.ones(())))
    assert kernels.variants[-1] is not None  # it is traced once the tensor is there
    assert not recwarn


def test_compiled_kernels_keep_no_tensor_of_tracing() -> None:
    """One without memory would end the process in a kernel."""
    kernels = make("inductor", nn.Linear(8, 8), (True,), (True,), scaling())
    for _ in range(2):
        assert kernels.forward((x,), with_loss=True).loss.isfinite()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # what torch says of a sum with such a tensor
def test_a_result_without_numbers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weight, "kept", None)
    weight = Weight()
    kernels = make("eager", nn.Linear(8, 8), (True,), (True,), lambda outputs, _: outputs[0].mean() * weight.of_class())
    with refused(PipegraphError, "loss_fn", "trace", advice="kernels='autograd'"):
        kernels.forward((x,), with_loss=True)
