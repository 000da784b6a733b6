"""Models that add hooks to tensors are trained as the unsplit model is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import BatchError
from pipegraph.package import Package
from tests.messages import refused
from tests.models import tensor_hooks as models
from tests.runtime import hook_ranks, ranks


def split(model: nn.Module, x: Tensor, folder: Path) -> Package:
    captured = pipegraph.capture(model, (x[:2],))
    return pipegraph.write_package(pipegraph.plan(captured, points=["blocks.1"]), folder / "out")


def assert_trains(model: nn.Module, package: Package, x: Tensor, schedule: str, count: int, **options: object) -> None:
    """Loss and all gradients are those of the model on the whole batch, and the hooks change them."""
    target, loss_fn = torch.randn_like(x), nn.MSELoss()
    parameters = dict(model.named_parameters())
    loss = loss_fn(model(x), target)
    gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    pipe = pipegraph.Pipeline(package, schedule, count, loss_fn=loss_fn, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(pipe.step(x, target=target).loss, loss.detach())
    for stage in pipe.stages.values():
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", models.RIGHT)
def test_a_pipeline_has_the_gradients_of_the_model(kind: type[models.Scaled], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = models.Residual(kind), torch.randn(8, 5, 8)
    package = split(model, x, tmp_path)
    assert_trains(model, package, x, "1f1b", 1, kernels="eager")
    assert_trains(model, package, x, "zb-h1", 4, kernels="eager")
    assert_trains(model, package, torch.randn(6, 3, 8), "gpipe", 3, kernels="eager", recompute="block")
    assert_trains(model, package, x, "1f1b", 2, kernels="autograd")


def test_the_hooks_change_the_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 5, 8)
    for kind in models.RIGHT:
        model = models.Residual(kind)
        parameters = list(model.parameters())
        hooked = torch.autograd.grad(model(x).square().mean(), parameters)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "register_hook", lambda tensor, hook: None)
            plain = torch.autograd.grad(model(x).square().mean(), parameters)
        assert not all(map(torch.allclose, hooked, plain)), kind


def test_compiled_kernels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = models.Residual(models.Masks), torch.randn(8, 5, 8)
    assert_trains(model, split(model, x, tmp_path), x, "zb-h1", 2, kernels="inductor")


def test_a_step_without_gradients(tmp_path: Path) -> None:
    model, x = models.Residual(models.Scaled), torch.randn(8, 5, 8)
    pipe = pipegraph.Pipeline(split(model, x, tmp_path), "1f1b", 4, loss_fn=nn.MSELoss(), kernels="eager")
    torch.testing.assert_close(pipe.evaluate(x, target=x).loss, nn.MSELoss()(model(x), x).detach())


def test_a_hook_of_the_gradient_of_all_rows_takes_one_microbatch(tmp_path: Path) -> None:
    model, x = models.Residual(models.ClipsNorm), torch.randn(8, 5, 8)
    package = split(model, x, tmp_path)
    assert_trains(model, package, x, "1f1b", 1, kernels="eager")
    pipe = pipegraph.Pipeline(package, "1f1b", 4, loss_fn=nn.MSELoss(), kernels="eager")
    with refused(BatchError, "Hook", "tensor_hooks.py:", advice="microbatches=1"):
        pipe.step(x, target=x)


@pytest.mark.parametrize(("kind", "said"), [("Scaled", ""), ("Masks", ""), ("TwoHooks", "ClipRowsHook of stage 0")])
def test_a_hook_that_reads_all_features_is_refused_along_tp(kind: str, said: str, tmp_path: Path) -> None:
    """Forwards are equal: only the backward of a hook says that it needs more than the part of a rank."""
    torch.manual_seed(0)
    model, x = models.Residual(getattr(models, kind)), torch.randn(8, 5, 8)
    plan = pipegraph.plan(pipegraph.capture(model, (x[:2],)), stages=1)
    pipegraph.write_package(plan, tmp_path / "out")
    for message in ranks.run(hook_ranks.trained_along_tp, 2, str(tmp_path / "out"), kind):
        assert said in message and bool(message) == bool(said)
        assert not said or "colwise_gather_output" in message.partition("\nTry: ")[2]
