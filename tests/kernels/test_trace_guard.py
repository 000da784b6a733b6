"""What changes between steps, and what a forward or a loss does beside its result, is as with autograd."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.kernels import make
from tests.kernels.stages import Function, assert_as_autograd, linear

x = torch.randn(4, 8)


class Setting(nn.Module):
    """Its forward sets an attribute."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.function = forward
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.a(x))


def _cache(stage: Any, x: Tensor) -> Tensor:
    if stage.cached is None:
        stage.cached = torch.full((8,), 2.0)
    return x * stage.cached


def _count(stage: Any, x: Tensor) -> Tensor:
    stage.count = stage.count + 1
    return x * stage.count


def _keep(stage: Any, x: Tensor) -> Tensor:
    stage.kept.append(x.detach())
    return x * len(stage.kept)


SETTING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a cache": (lambda: Setting(_cache, cached=None), "keeps a tensor"),
    "a count": (lambda: Setting(_count, count=0), "sets Setting.count"),
    "a buffer": (lambda: Setting(_count, count=torch.zeros(())), "sets Setting.count"),
    "a list": (lambda: Setting(_keep, kept=[]), "sets Setting.kept"),
}


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", SETTING)
def test_a_forward_that_sets_attributes_is_left_to_autograd(name: str, layers: int) -> None:
    made, message = SETTING[name]
    stage = nn.Sequential(*(made() for _ in range(layers)))
    reference = copy.deepcopy(stage)
    with pytest.warns(UserWarning, match=f"cannot be traced.*{message}"):
        assert_as_autograd(stage, (x,), traced=False)
    for _ in range(3):
        reference(x)
    for own, expected in zip(stage, reference, strict=True):
        assert getattr(own, "count", None) == getattr(expected, "count", None)
        assert len(getattr(own, "kept", ())) == len(getattr(expected, "kept", ()))
        assert all(type(value) is not torch._subclasses.FakeTensor for value in getattr(own, "kept", ()))


def test_a_cache_that_is_filled_is_traced_in_the_next_step() -> None:
    stage = Setting(_cache, cached=None)
    kernels = make("eager", stage, (True,), (True,))
    with pytest.warns(UserWarning, match="keeps a tensor"):
        kernels.forward((x,))
    kernels.begin()
    assert_close(kernels.forward((x,)).outputs[0], stage(x).detach())
    assert kernels.variants[-1] is not None  # type: ignore[attr-defined]


def test_a_tensor_that_a_closure_keeps_is_left_to_autograd() -> None:
    kept: list[Tensor] = []

    def forward(stage: Any, x: Tensor) -> Tensor:
        total = x + kept[0] if kept else x
        kept[:] = [x.detach()]
        return total

    kernels = make("eager", Setting(lambda s, x: forward(s, x)), (True,), (True,))
    with pytest.raises(Exception, match=r"FunctionalTensor|FakeTensor"):  # and not a wrong result
        kernels.forward((x,))


def _hook(stage: Any) -> None:
    stage[3].bias.register_hook(lambda gradient: gradient * 2)


def _replace(stage: Any) -> None:
    stage[0] = nn.Linear(8, 8)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a rate of dropout": lambda stage: setattr(stage[2], "p", 1.0),
    "a momentum": lambda stage: setattr(stage[1], "momentum", 0.9),
    "a module": _replace,
    "a parameter": lambda stage: setattr(stage[0], "weight", nn.Parameter(torch.ones(8, 8))),
    "the dtype": lambda stage: stage.double(),
    "a hook of a parameter": _hook,
    "a hook of a module": lambda stage: stage[0].register_forward_hook(lambda module, args, output: output * 2),
    "a frozen parameter": lambda stage: stage[0].weight.requires_grad_(False),
    "an evaluation": lambda stage: stage.eval(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_steps_is_noticed(name: str) -> None:
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 8))
    kernels = make("eager", stage, (True,), (True,))
    kernels.forward((x,))
    CHANGES[name](stage)
    reference = copy.deepcopy(stage)
    if name == "a hook of a parameter":  # which no copy has
        _hook(reference)
        kernels.begin()
        with pytest.warns(UserWarning, match="has a hook"):
            kernels.forward((x,), differentiable=False)
        reference(x)
    given = x.double() if name == "the dtype" else x
    kernels.begin()
    forward = kernels.forward((given,))
    expected = reference(given)
    assert_close(forward.outputs[0], expected.detach())
    assert_close(dict(stage.named_buffers()), dict(reference.named_buffers()))
    kernels.backward(forward.saved, (torch.ones_like(expected),))
    expected.sum().backward()
    assert_close(
        {n: p.grad for n, p in stage.named_parameters() if p.requires_grad},
        {n: p.grad for n, p in reference.named_parameters() if p.requires_grad},
    )
    assert stage[0].weight.requires_grad or stage[0].weight.grad is None


def test_an_attribute_that_holds_itself() -> None:
    stage = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    stage.tree = [{"name": "root"}]
    stage.tree[0]["inside"] = stage.tree
    assert_as_autograd(stage, (x,))


def test_the_dtype_of_compiled_kernels() -> None:
    stage = Function(lambda s, x: torch.tanh(x * s.a.weight + s.a.bias), **linear("a"))
    kernels = make("inductor", stage, (False,), (True,))
    ones = torch.ones(8, 8)
    kernels.forward((ones,))
    kernels.begin()
    stage.to(torch.bfloat16)
    kernels.begin()
    assert_close(kernels.forward((ones,)).outputs[0], stage(ones).detach(), rtol=1e-2, atol=1e-2)


def test_nothing_is_looked_for_twice_where_nothing_changed() -> None:
    stage = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    kernels: Any = make("eager", stage, (True,), (True,))
    kernels.begin()
    structure = kernels._standing._structure
    kernels.forward((x,))
    kernels.begin()
    assert kernels._standing._structure is structure


def step(kernels: Any, target: Any = None) -> Tensor:
    """A step of one microbatch: its loss."""
    kernels.begin()
    forward = kernels.forward((x,), target=target, with_loss=True)
    kernels.backward(forward.saved, (None, torch.ones(())))
    return forward.loss


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


@pytest.mark.parametrize("held", ["in a closure", "in an attribute", "itself"])
def test_a_loss_that_is_a_module(held: str) -> None:
    stage, loss = nn.Linear(8, 8), Scaled()
    other, reference = copy.deepcopy(stage), copy.deepcopy(loss)
    loss.holder = loss if held == "in an attribute" else None  # a module that holds itself
    function = loss if held == "itself" else lambda outputs, target: loss(outputs, target)
    if held == "itself":
        loss.forward = lambda outputs, target: Scaled.forward(loss, outputs[0], target)  # type: ignore[method-assign]
    else:
        function = lambda outputs, target: loss(outputs[0], target)  # noqa: E731
    kernels = make("eager", stage, (False,), (True,), function)
    plain = make("autograd", other, (False,), (True,), lambda outputs, target: reference(outputs[0], target))
    for value in (1.0, 1.0, 5.0):
        with torch.no_grad():
            loss.scale.fill_(value)
            reference.scale.fill_(value)
        assert_close(step(kernels), step(plain))
    assert_close(loss.scale.grad, reference.scale.grad)
    assert_close(loss.average, reference.average)
    assert_close(stage.weight.grad, other.weight.grad)
    assert None not in kernels.variants  # type: ignore[attr-defined]


FACTOR: Any = 1.0


@pytest.mark.parametrize("change", ["a number in a closure", "a global", "an attribute", "a module's attribute"])
def test_what_a_loss_reads_is_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = 1.0

    class Times:
        factor = 1.0

        def __call__(self, outputs: Any, target: Any) -> Tensor:
            return self.factor * outputs[0].sum()

    times = Times()
    times.factor = 1.0
    smoothed = nn.CrossEntropyLoss()
    losses: dict[str, Any] = {
        "a number in a closure": lambda outputs, target: factor * outputs[0].sum(),
        "a global": lambda outputs, target: FACTOR * outputs[0].sum(),
        "an attribute": times,
        "a module's attribute": lambda outputs, target: smoothed(outputs[0], torch.arange(4)),
    }
    loss = losses[change]
    stage = nn.Linear(8, 8)
    kernels = make("eager", stage, (True,), (True,), loss)
    step(kernels)
    factor = times.factor = smoothed.label_smoothing = 0.5
    monkeypatch.setitem(globals(), "FACTOR", 0.5)
    assert_close(step(kernels), loss((stage(x),), None).detach())


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
    with pytest.warns(UserWarning, match=r"shape \[8\] requires a gradient"):
        step(kernels)
    assert weight.grad is not None


def test_a_tensor_that_is_written_to_is_left_to_autograd() -> None:
    average = torch.zeros(())

    def loss(outputs: Any, target: Any) -> Tensor:
        found = outputs[0].sum()
        average.add_(found.detach())
        return found

    kernels = make("eager", nn.Linear(8, 8), (True,), (True,), loss)
    with pytest.warns(UserWarning, match="cannot be traced"):
        found = sum(step(kernels) for _ in range(3))
    assert_close(average, found)


def test_a_loss_that_keeps_what_it_found() -> None:
    found: list[Tensor] = []

    def loss(outputs: Any, target: Any) -> Tensor:
        found.append(outputs[0].sum())
        return found[-1]

    kernels = make("eager", nn.Linear(8, 8), (True,), (True,), loss)
    with pytest.warns(UserWarning, match="sets a list"):
        losses = [step(kernels) for _ in range(3)]
    assert_close(found, losses)


def test_a_number_that_is_another_one_at_each_step_is_left_to_autograd() -> None:
    stage = nn.Linear(8, 8)
    kernels: Any = make("eager", stage, (True,), (True,), lambda outputs, target: outputs[0].sum() * target)
    for number in range(8):
        step(kernels, float(number))
    with pytest.warns(UserWarning, match="ever other values in Python.*give what changes as a tensor") as caught:
        found = [step(kernels, float(number)) for number in range(8, 12)]
    assert len(caught) == 1 and len(kernels.variants) == 8
    assert_close(torch.stack(found), stage(x).sum().detach() * torch.arange(8, 12))
    step(kernels, 3.0)  # as before


def test_what_is_wrong_with_a_loss_is_not_announced_as_tracing(caplog: pytest.LogCaptureFixture) -> None:
    kernels = make("eager", nn.Linear(8, 8), (True,), (True,), lambda outputs, target: F.mse_loss(outputs[0] @ x, x))
    with caplog.at_level(logging.DEBUG), pytest.raises(RuntimeError, match="cannot be multiplied"):
        step(kernels)  # where a warning would be an error
    assert not caplog.records
