"""Hooks that a model has when it is captured."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipegraph
from pipegraph.errors import CaptureError, PipegraphError, PlanError
from pipegraph.package import Package
from tests.codegen.parity import untidy
from tests.graph.audit.hooked_models import batch, build_model, expected_gradients, train_on_ranks
from tests.messages import refused
from tests.runtime import ranks

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    captured = pipegraph.capture(build_model(), batch()[:1])
    return pipegraph.write_package(
        pipegraph.plan(captured, points=["layers.1", "layers.3"]), tmp_path_factory.mktemp("hooked") / "out"
    )


@pytest.mark.parametrize(
    ("kernels", "schedule", "microbatches"), [("autograd", "1f1b", 4), ("eager", "zb-h1", 4), ("eager", "gpipe", 1)]
)
def test_hooks_are_those_of_the_whole_batch(package: Package, kernels: str, schedule: str, microbatches: int) -> None:
    """Two accumulated steps, with another number of rows: a hook is called once for each, as by two backwards."""
    pipe = pipegraph.Pipeline(
        package, microbatches=microbatches, kernels=kernels, loss_fn=F.cross_entropy, schedule=schedule
    )
    batches = batch(), batch(12, 2)
    for x, target in batches:
        pipe.step(x, target=target)
    actual = {name: parameter.grad for stage in pipe.stages.values() for name, parameter in stage.named_parameters()}
    for name, gradient in expected_gradients(*batches).items():
        torch.testing.assert_close(actual[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
    assert all(not count.autograd for count in pipe.kernels_report()) or kernels == "autograd"


def test_hooks_with_compiled_kernels(package: Package) -> None:
    test_hooks_are_those_of_the_whole_batch(package, "inductor", "1f1b", 2)


def test_a_stage_that_is_trained_alone_has_them(package: Package) -> None:
    """Ties are left to `StandaloneStages`."""
    stages = {index: package.load_stage(index) for index in range(3)}
    x, target = batch()
    with pipegraph.StandaloneStages(package, stages).summed_gradients():
        for rows in (slice(0, 4), slice(4, 8)):
            (F.cross_entropy(stages[2](stages[1](stages[0](x[rows]))), target[rows]) / 2).backward()
    actual = {name: parameter.grad for stage in stages.values() for name, parameter in stage.named_parameters()}
    for name, gradient in expected_gradients((x, target)).items():
        torch.testing.assert_close(actual[name], gradient)
    alone = package.load_stage(1)
    parameter = alone.get_parameter("layers.1.up.weight")
    parameter.sum().backward()
    assert parameter.grad is not None and 0 < parameter.grad.count_nonzero() < parameter.numel()


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        ({"pp": 3}, ""),
        ({"pp": 1, "dp_replicate": 2}, ""),
        ({"pp": 1, "dp_shard": 2}, "has a hook in the model"),
        ({"pp": 1, "tp": 2}, "has a hook in the model"),
    ],
)
def test_hooks_on_several_ranks(package: Package, shape: dict[str, int], error: str) -> None:
    errors = ranks.run(train_on_ranks, math.prod(shape.values()), str(package.path), shape, timeout=100)
    if error:
        assert all(len(texts) == 1 and error in texts[0] and "Try: " in texts[0] for texts in errors), errors
    else:
        assert errors == [[]] * len(errors), errors


def test_the_source_of_a_hook(package: Package) -> None:
    text = (package.path / "stage_2.py").read_text(encoding="utf-8")
    assert text.split("    def register_hooks(self):\n")[1] == (
        '        """Register the hooks of gradients that the model has. Weights are loaded before."""\n'
        "\n"
        "        def clip(gradient):\n"
        "            norm = gradient.norm()\n"
        "            if norm > 0.05:\n"
        "                gradient = gradient * (0.05 / norm)\n"
        "            return gradient\n"
        "\n"
        "        self.last.weight.register_hook(clip)\n"
        '        self.layers["3"].norm.bias.register_hook(lambda g: F.normalize(g, dim=0) * 0.01)\n'
        '        self.layers["3"].up.weight.register_post_accumulate_grad_hook('
        'lambda p: setattr(p, "grad", p.grad * 0.5))\n'
        "\n"
        "        def hook(gradient):\n"
        "            return torch.clamp(gradient, -0.01, 0.01) + 0.1 * self.head.weight.detach().sign()\n"
        "\n"
        "        self.head.weight.register_hook(hook)\n"
        '        self.layers["3"].register_full_backward_hook(lambda module, inputs, outputs: (-inputs[0],))\n'
        "        self.act.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))\n"
    )
    assert untidy(package.path) == []


def test_a_plan_does_not_cut_a_module_with_a_hook() -> None:
    captured = pipegraph.capture(build_model(), batch()[:1])
    plan = pipegraph.plan(captured, stages=4)
    assert all(not str(point).startswith("layers.3.") for point in plan.points)
    with refused(PlanError, "layers.3", "hook", "hooked_models.py:70", advice="before and after it"):
        pipegraph.plan(captured, points=["layers.3.up"])


COUNTS: list[int] = []
NOISE = torch.ones(8)


def counting(gradient: Tensor) -> None:
    COUNTS.append(1)


def drawing(gradient: Tensor) -> Tensor:
    return gradient + torch.randn_like(gradient)


def writing(gradient: Tensor) -> Tensor:
    return gradient * NOISE.add_(1)


def changing(module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    NOISE.add_(1)


def scaling(module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (inputs[0] * module.bias[0],)  # type: ignore[index]


def halving(module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (inputs[0] * 0.5,)


def raising(gradient: Tensor) -> Tensor:
    return gradient[100]


def frozen(net: nn.Sequential) -> None:
    layer: Any = net[2]
    layer.bias.register_hook(lambda gradient: gradient * 2)
    layer.bias.requires_grad_(False)


def same_memory(net: nn.Sequential) -> None:
    layers: list[Any] = list(net)
    layers[0].weight = nn.Parameter(layers[2].weight.data)
    layers[2].weight.register_hook(lambda gradient: gradient * 2)


@pytest.mark.parametrize(
    ("add", "parts"),
    [
        (lambda net: net[2].bias.register_hook(counting), ["parameter 2.bias", "COUNTS.append"]),
        (lambda net: net[2].bias.register_hook(drawing), ["2.bias", "something else"]),
        (lambda net: net[2].bias.register_hook(writing), ["2.bias", "changes a tensor"]),
        (lambda net: net[2].bias.register_hook(print), ["2.bias", "no source"]),
        (lambda net: net[2].bias.register_hook(lambda g: halve(g)), ["2.bias", "halve"]),
        (lambda net: net[2].bias.register_hook(lambda g: g if net.training else 0 * g), ["2.bias", "net.training"]),
        (lambda net: net[2].register_full_backward_hook(lambda *_: None), ["2 has", "*args"]),
        (lambda net: net[2].register_full_backward_hook(changing), ["2 has", "changes a tensor"]),
        (lambda net: net[2].register_full_backward_hook(scaling), ["2 has", "attribute bias"]),
        (lambda net: net.append(net[2])[3].register_full_backward_hook(halving), ["2 has", "names: 2, 3"]),
        (
            lambda net: net.add_module("rest", nn.Linear(8, 8)) or net[3].bias.register_hook(raising),
            ["rest.bias", "IndexError"],
        ),
        (lambda net: net[2].bias.register_hook(lambda self: self * NOISE), ["2.bias", "variable self"]),
        (lambda net: net[2].bias.register_hook(lambda g: g.double()), ["2.bias", "torch.float64"]),
        (frozen, ["2.bias", "requires_grad"]),
        (same_memory, ["2.weight", "several parameters"]),
        (lambda net: net[2].register_full_backward_pre_hook(lambda m, g: g[0] / g[0].norm()), ["2 has", "depends"]),
        (lambda net: net[2].register_backward_hook(lambda m, i, o: None), ["2 has", "register_full_backward_hook"]),
        (lambda net: net.register_full_backward_hook(lambda m, i, o: None), ["Sequential", "the model itself"]),
    ],
)
def test_hooks_that_are_refused(add: Callable[[nn.Sequential], object], parts: list[str]) -> None:
    hooked = model()
    add(hooked)
    with refused(CaptureError, "hook", *parts, advice="parallelize_fn"):
        pipegraph.capture(hooked, (X,))
    assert not COUNTS
    assert torch.equal(NOISE, torch.ones(8)), "what a hook changed when it was tried is put back"


class Pairs(nn.Module):
    """Modules with two inputs, without parameters and in a row, each with a hook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.mix, self.last = nn.Linear(8, 8), Activation(), Mix(), nn.Linear(8, 8)
        self.row = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Dropout(0.0))
        self.act.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
        self.mix.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3, inputs[1] * 0.25))
        for layer in (self.row, self.row[1], self.row[2]):
            layer.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.75,))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        return self.last(self.row(self.mix(x, x.sin())))


class Activation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class Mix(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


@pytest.mark.parametrize("kernels", ["autograd", "eager"])
def test_hooks_of_modules_of_each_kind(kernels: str, tmp_path: Path) -> None:
    package = pipegraph.write_package(
        pipegraph.plan(pipegraph.capture(Pairs(), (X,)), points=["mix"]), tmp_path / "out"
    )
    pipe = pipegraph.Pipeline(package, microbatches=2, kernels=kernels, loss_fn=F.mse_loss)
    pipe.step(X, target=torch.ones(4, 8))
    expected = Pairs()
    F.mse_loss(expected(X), torch.ones(4, 8)).backward()
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_a_hook_of_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(4, 8)
    layers: list[Any] = list(net)
    layers[0].weight.register_hook(lambda gradient: gradient * 0.5)
    assert [hook.owner for hook in pipegraph.capture(net, (x,)).hooks] == ["0.weight"]
    layers[1].weight.register_hook(drawing)
    with refused(CaptureError, "1.weight", "hook", "something else"):
        pipegraph.capture(net, (x,))


def test_a_hook_that_fails_loses_no_gradient(tmp_path: Path) -> None:
    """It returns another dtype than that of a stage in 16 bits."""
    net = model()
    net[2].weight.register_hook(lambda gradient: gradient * FACTOR)
    package = pipegraph.write_package(pipegraph.plan(pipegraph.capture(net, (X,)), points=["2"]), tmp_path / "out")
    pipe = pipegraph.Pipeline(package, kernels="autograd", loss_fn=F.mse_loss, precision="bf16-true")
    weight: Any = pipe.stages[1].get_parameter("2.weight")
    weight.grad = torch.ones_like(weight)
    with refused(PipegraphError, "2.weight of stage 1", "torch.float32", "torch.bfloat16", advice="gradient.dtype"):
        pipe.step(X, target=torch.ones(4, 8))
    assert weight.grad is not None and not torch.equal(weight.grad, torch.zeros_like(weight))


FACTOR = torch.full((8, 8), 0.5)


def test_forward_hooks_are_in_the_graph(tmp_path: Path) -> None:
    hooked = model()
    hooked[0].register_forward_hook(lambda module, inputs, output: output * 2)
    package = pipegraph.write_package(pipegraph.plan(pipegraph.capture(hooked, (X,)), points=["2"]), tmp_path / "out")
    pipe = pipegraph.Pipeline(package, kernels="autograd")
    torch.testing.assert_close(pipe.eval(X), hooked(X).detach())


def test_the_cure_is_one(tmp_path: Path) -> None:
    """A hook on the stage's parameter is called for every microbatch, and scales what they add up."""
    package = pipegraph.write_package(pipegraph.plan(pipegraph.capture(model(), (X,)), points=["2"]), tmp_path / "out")

    def add(stage: nn.Module) -> None:
        for name, parameter in stage.named_parameters():
            if name == "2.weight":
                parameter.register_hook(halve)

    pipe = pipegraph.Pipeline(
        package, microbatches=2, kernels="autograd", loss_fn=F.mse_loss, parallelize_fn=add, schedule="gpipe"
    )
    pipe.step(X, target=torch.ones(4, 8))
    expected = model()
    expected[2].weight.register_hook(halve)
    F.mse_loss(expected(X), torch.ones(4, 8)).backward()
    torch.testing.assert_close(pipe.stages[1].get_parameter("2.weight").grad, expected[2].weight.grad)
