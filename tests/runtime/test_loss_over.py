"""What a loss is over: rows, which the first step checks, the whole batch, or a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import ArgumentError, BatchError, ScheduleError
from pipegraph.package import Package
from pipegraph.package.manifest import BatchEntry
from tests.messages import refused
from tests.runtime.ranks import run


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    scores = F.normalize(output, dim=1) @ F.normalize(target, dim=1).t() / 0.1
    return F.cross_entropy(scores, torch.arange(output.shape[0]))


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 6, generator=generator)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    captured = pipegraph.capture(model(), (torch.randn(2, 8),))
    return pipegraph.write_package(pipegraph.plan(captured, points=["2"]), tmp_path_factory.mktemp("package") / "out")


def reference(loss_fn: Callable[..., Tensor], x: Tensor, target: Any) -> tuple[Tensor, dict[str, Any]]:
    module = model()
    loss = loss_fn(module(x), target)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in module.named_parameters()}


def gradients(pipe: pipegraph.Pipeline) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
@pytest.mark.parametrize("rows", [8, 6])
def test_a_loss_over_the_batch(package: Package, rows: int, kernels: str) -> None:
    """Of equal and of unequal microbatches, and in an evaluation."""
    pipe = pipegraph.Pipeline(package, "gpipe", 4, contrastive, kernels=kernels, loss_over="batch")
    x, target = batch(rows)
    result = pipe.step(x, target=target, return_outputs=True)
    loss, expected = reference(contrastive, x, target)
    torch.testing.assert_close(result.loss, loss)
    torch.testing.assert_close(gradients(pipe), expected)
    torch.testing.assert_close(result.outputs, model()(x).detach())
    torch.testing.assert_close(pipe.evaluate(x, target=target).loss, loss)
    parts = pipe.step(list(x.split(2)), target=list(target.split(2)))
    torch.testing.assert_close(parts.loss, loss)


def test_schedules_whose_last_stage_begins_its_backwards_early(package: Package) -> None:
    with refused(ScheduleError, 'loss_over="batch"', "4 microbatches", "1f1b", advice="gpipe"):
        pipegraph.Pipeline(package, "1f1b", 4, contrastive, kernels="eager", loss_over="batch")
    pipe = pipegraph.Pipeline(package, "1f1b", 1, contrastive, kernels="eager", loss_over="batch")
    x, target = batch()
    with refused(ScheduleError, 'loss_over="batch"', "2 microbatches", advice="gpipe"):
        pipe.step(x, target=target, microbatches=2)


def test_other_arguments_of_the_loss(package: Package) -> None:
    with refused(ArgumentError, "loss_over", "'rank'", advice='"batch"'):
        pipegraph.Pipeline(package, loss_fn=contrastive, loss_over="rank")
    with refused(ArgumentError, 'loss_over="batch"', "loss_reduction", advice="one of the two"):
        pipegraph.Pipeline(package, loss_fn=contrastive, loss_over="batch", loss_reduction="sum")


def of_rank(rank: int, folder: str) -> Any:
    pipe = pipegraph.Pipeline(folder, "gpipe", 4, contrastive, kernels="eager", loss_over="batch")
    x, target = batch()
    return pipe.step(x, target=target).loss, gradients(pipe)


def test_a_loss_over_the_batch_on_two_ranks(package: Package) -> None:
    results = run(of_rank, 2, str(package.path))
    assert all(isinstance(result, tuple) for result in results), results
    x, target = batch()
    loss, expected = reference(contrastive, x, target)
    torch.testing.assert_close(results[1][0], loss)
    torch.testing.assert_close(results[0][1] | results[1][1], expected)


def of_copy(rank: int, folder: str) -> Any:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate"))
    pipegraph.Pipeline(folder, "gpipe", 4, contrastive, kernels="eager", loss_over="batch", mesh=mesh)


def test_data_parallel_ranks_are_refused(package: Package) -> None:
    results = run(of_copy, 4, str(package.path))
    assert all("divided between data-parallel ranks" in result for result in results), results


LABELS = torch.tensor([0, -100, -100, 1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("loss_fn", "target", "microbatches"),
    [(contrastive, batch()[1], 2), (contrastive, batch()[1], 8), (F.cross_entropy, LABELS, 2)],
    ids=["contrastive", "rows one by one", "mean over tokens that count"],
)
def test_a_loss_that_is_not_a_mean_over_rows(
    package: Package, loss_fn: Callable[..., Tensor], target: Tensor, microbatches: int
) -> None:
    pipe = pipegraph.Pipeline(package, "1f1b", microbatches, loss_fn, kernels="eager")
    with refused(BatchError, "loss_fn", "mean over rows", "a microbatch", advice="loss_weight=") as raised:
        pipe.step(batch()[0], target=target)
    assert all(option in raised.value.advice for option in ('loss_over="batch"', 'loss_over="microbatch"'))
    accepting = pipegraph.Pipeline(package, "1f1b", microbatches, loss_fn, kernels="eager", loss_over="microbatch")
    accepting.step(batch()[0], target=target)


def random_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(F.dropout(output, 0.5), target)


def mean_with_metrics(output: Tensor, target: Tensor) -> Any:
    return F.mse_loss(output, target), {"largest": output.max()}


@pytest.mark.parametrize(
    ("loss_fn", "target", "options"),
    [
        (F.mse_loss, batch()[1], {}),
        (mean_with_metrics, batch()[1], {}),
        (random_loss, batch()[1], {}),
        (F.cross_entropy, LABELS.clamp(min=0), {}),
        (lambda o, t: F.mse_loss(o, t, reduction="sum"), batch()[1], {"loss_reduction": "sum"}),
        (
            lambda o, t: F.cross_entropy(o, t, reduction="sum"),
            LABELS,
            {"loss_weight": lambda target: (target >= 0).sum()},
        ),
        (lambda o, t: (o - o.detach()).sum() + 1e-12 * F.mse_loss(o, t), batch()[1], {}),  # nearly 0
    ],
)
@pytest.mark.parametrize("microbatches", [2, 3, 8])
def test_right_losses_pass(
    package: Package, loss_fn: Any, target: Tensor, options: dict[str, Any], microbatches: int
) -> None:
    random_state = torch.get_rng_state() if loss_fn is not random_loss else None
    pipe = pipegraph.Pipeline(package, "1f1b", microbatches, loss_fn, kernels="eager", **options)
    pipe.step(batch()[0], target=target)
    assert random_state is None or torch.equal(random_state, torch.get_rng_state())


def test_a_mean_with_loss_reduction_sum(package: Package) -> None:
    pipe = pipegraph.Pipeline(package, "gpipe", 2, F.mse_loss, kernels="eager", loss_reduction="sum")
    with refused(BatchError, "loss_fn", "not a sum", advice="loss_weight="):
        pipe.step(batch()[0], target=batch()[1])


class WithLoss(nn.Module):
    """It returns its own loss, as transformers' models with labels do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(torch.tanh(self.first(x)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_model_that_returns_its_loss(tmp_path: Any) -> None:
    captured = pipegraph.capture(WithLoss(), (torch.randn(2, 8), torch.tensor([0, 1])))
    package = pipegraph.write_package(pipegraph.plan(captured, points=["last"]), tmp_path / "out")
    proved = replace(package, manifest=structs.replace(package.manifest, batch=BatchEntry("rules")))
    pipe = pipegraph.Pipeline(proved, "1f1b", 2, lambda output, target: output["loss"], kernels="eager")
    x, _ = batch()
    with refused(BatchError, "loss_fn", "mean over rows", advice="loss_weight="):
        pipe.step(x, LABELS)
    pipe = pipegraph.Pipeline(proved, "1f1b", 2, lambda output, target: output["loss"], kernels="eager")
    pipe.step(x, LABELS.clamp(min=0))
