"""When a stage is traced again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.errors import PipegraphError
from pipegraph.kernels import make, maker
from tests.kernels.stages import Function, Layers, linear, step, x
from tests.kernels.test_attribute_snapshot import Setting, count
from tests.messages import refused, warned


def _hook(stage: Any) -> None:
    stage[3].bias.register_hook(lambda gradient: gradient * 2)


def _replace(stage: Any) -> None:
    stage[0] = nn.Linear(8, 8)


NOTICED: dict[str, Callable[[Any], Any]] = {
    "a module": _replace,
    "a parameter": lambda stage: setattr(stage[0], "weight", nn.Parameter(torch.ones(8, 8))),
    "a buffer": lambda stage: setattr(stage[1], "running_mean", torch.ones(8)),
    "the dtype": lambda stage: stage.double(),
    "a hook of a parameter": _hook,
    "a hook of a module": lambda stage: stage[0].register_forward_hook(lambda module, args, output: output * 2),
    "a frozen parameter": lambda stage: stage[0].weight.requires_grad_(False),
    "an evaluation": lambda stage: stage.eval(),
}
RETRACED: dict[str, Callable[[Any], Any]] = {
    "a rate of dropout": lambda stage: setattr(stage[2], "p", 1.0),
    "a momentum": lambda stage: setattr(stage[1], "momentum", 0.9),
}


@pytest.mark.parametrize("name", [*NOTICED, *RETRACED])
def test_what_changes_between_steps(name: str) -> None:
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 8))
    kernels = make("eager", stage, (True,), (True,))
    kernels.forward((x,))
    (NOTICED | RETRACED)[name](stage)
    reference = copy.deepcopy(stage)
    if name in RETRACED:
        kernels.retrace()
    if name == "a hook of a parameter":  # which no copy has
        _hook(reference)
        kernels.begin()
        with pytest.warns(UserWarning, match="has a hook"):
            kernels.forward((x,), differentiable=False)
        reference(x)
    batch = x.double() if name == "the dtype" else x
    kernels.begin()
    forward = kernels.forward((batch,))
    expected = reference(batch)
    assert_close(forward.outputs[0], expected.detach())
    assert_close(dict(stage.named_buffers()), dict(reference.named_buffers()))
    kernels.backward(forward.saved, (torch.ones_like(expected),))
    expected.sum().backward()
    assert_close(
        {n: p.grad for n, p in stage.named_parameters() if p.requires_grad},
        {n: p.grad for n, p in reference.named_parameters() if p.requires_grad},
    )
    assert stage[0].weight.requires_grad or stage[0].weight.grad is None


def test_freezing_is_seen() -> None:
    stage = Layers()
    kernels = make("eager", stage, (True,), (True,))
    for trainable in (True, False, True):
        stage.zero_grad()
        stage.head.requires_grad_(trainable)
        kernels.begin()
        kernels.backward(kernels.forward((x,)).saved, (torch.ones(4, 4),))
        assert (stage.head.weight.grad is not None) is trainable
        assert stage.layers[0].up.weight.grad is not None


def test_the_modes_of_modules_reach_the_kernels_and_are_traced_once() -> None:
    stage = Layers(p=0.5)
    kernels = make("eager", stage, (True,), (True,))
    for _ in range(2):
        stage.eval()
        kernels.begin()
        assert_close(kernels.forward((x,)).outputs[0], stage(x).detach())
        stage.layers[1].dropout.train()
        kernels.begin()
        first, second = (kernels.forward((x,), differentiable=False).outputs[0] for _ in range(2))
        assert not torch.equal(first, second)
    assert len(kernels.variants) == 2


def test_a_hook_of_a_parameter_is_called() -> None:
    stage = Layers()
    stage.head.bias.register_hook(lambda gradient: gradient * 2)
    kernels = make("eager", stage, (True,), (True,))
    with pytest.warns(UserWarning, match="has a hook"):
        forward = kernels.forward((x,))
    kernels.backward(forward.saved, (torch.ones(4, 4),))
    assert_close(stage.head.bias.grad, torch.full((4,), 8.0))


FACTOR: Any = 1.0


@pytest.mark.parametrize("change", ["a number in a closure", "a global", "an attribute", "a module's attribute"])
def test_what_a_loss_reads_is_a_constant_until_retraced(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    first = step(kernels)
    factor = times.factor = smoothed.label_smoothing = 0.5
    monkeypatch.setitem(globals(), "FACTOR", 0.5)
    assert_close(step(kernels), first)
    kernels.retrace()
    assert_close(step(kernels), loss((stage(x),), None).detach())
    assert not torch.equal(step(kernels), first)


def test_another_module_or_tensor_of_a_loss_is_noticed() -> None:
    class Holder:
        def __init__(self) -> None:
            self.criterion: nn.Module = nn.MSELoss()
            self.weight = torch.ones(())

        def loss(self, outputs: Any, target: Any) -> Tensor:
            return self.criterion(outputs[0], x) * self.weight

    holder, stage = Holder(), nn.Linear(8, 8)
    kernels = make("eager", stage, (True,), (True,), holder.loss)
    for change in ({}, {"criterion": nn.L1Loss()}, {"weight": torch.full((), 2.0)}):
        vars(holder).update(change)
        assert_close(step(kernels), holder.loss((stage(x),), None).detach())
        assert len(kernels.variants) == 1  # type: ignore[attr-defined]


def test_the_dtype_of_compiled_kernels() -> None:
    stage = Function(lambda s, x: torch.tanh(x * s.a.weight + s.a.bias), **linear("a"))
    kernels = make("inductor", stage, (False,), (True,))
    inputs = torch.ones(8, 8)
    kernels.forward((inputs,))
    kernels.begin()
    stage.to(torch.bfloat16)
    kernels.begin()
    assert_close(kernels.forward((inputs,)).outputs[0], stage(inputs).detach(), rtol=1e-2, atol=1e-2)


def test_variants_beyond_the_most_are_left_to_autograd() -> None:
    stage = nn.Linear(8, 8)
    make_stage = maker("eager", max_variants=3)
    kernels: Any = make_stage(stage, (True,), (True,), lambda outputs, target: outputs[0].sum() * target)
    for number in range(3):
        step(kernels, float(number))
    with warned("3 variants", "as a tensor", "max_variants") as caught:
        losses = [step(kernels, float(number)) for number in range(3, 6)]
    assert len(caught) == 1 and len(kernels.variants) == 3
    assert_close(torch.stack(losses), stage(x).sum().detach() * torch.arange(3, 6))
    step(kernels, 2.0)  # is traced
    kernels.retrace()
    step(kernels, 6.0)
    assert None not in kernels.variants


def test_no_variants_at_all_are_refused() -> None:
    with refused(PipegraphError, "max_variants", "0", advice="8"):
        maker("eager", max_variants=0)


def test_equal_graphs_are_not_compiled_again() -> None:
    stage = Layers()
    kernels: Any = make("eager", stage, (True,), (True,))
    compiled = []
    for change in (lambda: None, kernels.retrace, lambda: setattr(stage.head, "bias", nn.Parameter(torch.ones(4)))):
        change()
        kernels.begin()
        kernels.prepare((x,), target=None, with_loss=False, differentiable=True, kinds="FIW")
        (variant,) = kernels.variants
        programs = variant._programs.values()
        compiled.append({id(graph) for program in programs for graph in program.compiled_graphs()})
    assert compiled[0] == compiled[1] == compiled[2]


def test_nothing_is_traced_again_if_nothing_changed() -> None:
    stage = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    kernels: Any = make("eager", stage, (True,), (True,))
    kernels.forward((x,))
    variants = kernels.variants
    kernels.begin()
    kernels.forward((x,))
    assert kernels.variants == variants and len(variants) == 1


def test_a_forward_that_replaces_a_buffer_is_tried_once() -> None:
    stage = Setting(count, count=torch.zeros(()))
    kernels: Any = make("eager", stage, (True,), (True,))
    with pytest.warns(UserWarning, match="sets Setting.count"):
        kernels.forward((x,))
    for _ in range(3):
        kernels.begin()
        kernels.forward((x,))
    assert kernels.variants == [None] and kernels._variant_count == 1
