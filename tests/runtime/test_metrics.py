"""Metrics that a loss function returns with the loss, and how both are put together from microbatches."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipegraph.errors import ArgumentError, RuntimeFault
from tests.messages import refused
from tests.runtime import ranks, sized_model, step_ranks
from tests.runtime.packages import write
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import chain


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(sized_model.write(tmp_path_factory.mktemp("sized")))


@pytest.mark.parametrize(
    ("schedule", "kernels"),
    [
        ("gpipe", "autograd"),
        ("1f1b", "autograd"),
        ("interleaved-1f1b", "autograd"),
        ("zb-h1", "autograd"),
        ("zb-v", "eager"),
    ],
)
def test_metrics_are_weighed_as_the_loss_is(schedule: str, kernels: str, package: str) -> None:
    assert step_ranks.metrics(None, package, schedule, kernels) == "equal"


def test_metrics_are_on_the_rank_of_the_last_stage(package: str) -> None:
    assert ranks.run(step_ranks.metrics, 2, package, "zb-v", "autograd") == ["equal"] * 2


def test_compiled_kernels_return_metrics(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), kernels="inductor", microbatches=2, loss_fn=step_ranks.judged)
    result = pipe.step(torch.ones(4, 8), target=torch.zeros(4, 8))
    assert result.metrics is not None and result.metrics["loss"] == result.loss and result.metrics["one"] == 1
    assert [count.static for count in pipe.kernels_report()] == [1, 1]


def step(folder: Path, loss_fn: Any, kernels: str, microbatches: int = 2, loss_over: str = "rows") -> Any:
    options = {"kernels": kernels, "microbatches": microbatches, "loss_fn": loss_fn, "loss_over": loss_over}
    pipe, rows = pipeline(folder, **options), 2 * microbatches
    return pipe.step(torch.ones(rows, 8), target=torch.zeros(rows, 8))


def test_a_loss_without_metrics_has_none(tmp_path: Path) -> None:
    assert step(write(chain(1), tmp_path / "chain"), lambda output, _: output.mean(), "eager").metrics == {}


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
@pytest.mark.parametrize(
    ("metrics", "parts", "advice"),
    [
        ([1], ["a list for metrics"], "a dict of tensors"),
        ({"accuracy": 0.5}, ["'accuracy'", "float"], "without .item()"),
        ({"hits": torch.ones(3)}, ["'hits'", "shape [3]"], "mean"),
        ({1: torch.ones(())}, ["name 1"], "'1'"),
        (None, ["a tuple of 3 items"], "(loss, metrics)"),
    ],
)
def test_what_is_no_metric_is_refused_where_it_is_returned(
    metrics: Any, parts: list[str], advice: str, kernels: str, tmp_path: Path
) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Any:
        return (output.mean(), 1, 2) if metrics is None else (output.mean(), metrics)

    with refused(RuntimeFault, "rank 1 failed in stage 1, action 1F0, microbatch 0", *parts, advice=advice):
        step(write(chain(2), tmp_path / "chain"), loss_fn, kernels)


def test_names_of_metrics_do_not_change_between_microbatches(tmp_path: Path) -> None:
    numbers = itertools.count()

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        return output.mean(), {} if next(numbers) == 2 else {"a": output.sum()}

    with refused(RuntimeFault, "action 0F2", "no metrics for microbatch 2", "a for microbatch 0", advice="nan"):
        step(write(chain(1), tmp_path / "chain"), loss_fn, "autograd", microbatches=4, loss_over="microbatch")


def test_a_metric_is_what_it_was_when_its_microbatch_ran(tmp_path: Path) -> None:
    counter = torch.zeros(())

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        counter.add_(1)
        return output.mean(), {"seen": counter}

    assert step(write(chain(1), tmp_path / "chain"), loss_fn, "autograd").metrics == {"seen": torch.tensor(1.5)}


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
@pytest.mark.parametrize(
    "loss_fn",
    [F.cross_entropy, F.mse_loss, lambda output, target: (output - target).mean(), lambda output, target: target["y"]],
)
def test_a_loss_that_lacks_its_target_says_so(loss_fn: Any, kernels: str, tmp_path: Path) -> None:
    pipe = pipeline(write(chain(1), tmp_path / "chain"), kernels=kernels, loss_fn=loss_fn)
    with refused(RuntimeFault, "loss_fn(output, None)", "no target", advice="target=…"):
        pipe.step(torch.ones(2, 8))


@pytest.mark.parametrize(("schedule", "kernels"), [("1f1b", "autograd"), ("zb-v", "eager")])
def test_a_sum_over_microbatches_is_the_sum_over_the_batch(schedule: str, kernels: str, package: str) -> None:
    assert step_ranks.sums(None, package, schedule, kernels) == "equal"


def test_a_sum_over_ranks(package: str) -> None:
    assert ranks.run(step_ranks.sums, 2, package, "zb-v", "autograd") == ["equal"] * 2


def test_another_reduction_is_refused(tmp_path: Path) -> None:
    with refused(ArgumentError, "loss_reduction", "'none'", advice='"mean"'):
        pipeline(tmp_path, loss_reduction="none")
