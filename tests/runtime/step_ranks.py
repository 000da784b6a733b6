"""What steps give, beside the whole model: functions for one process, or for `ranks.run` as each rank of several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from tests.runtime.pipelines import pipeline
from tests.runtime.sized_model import LENGTH, Model, inputs

ROWS = (8, 9, 2)  # even and uneven microbatches, and fewer rows than microbatches
MICROBATCHES = 4


def judged(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss with metrics: one with a gradient of its own, one of integers, one that is a constant, the loss itself."""
    loss = (output - target).square().mean()
    hits = (output > target).sum()
    return loss, {"distance": (output - target).abs().mean(), "hits": hits, "one": torch.tensor(1.0), "loss": loss}


def metrics(rank: int | None, folder: str, schedule: str = "1f1b", kernels: str = "eager") -> str:
    """Metrics are weighed as the loss is, and add nothing to gradients."""
    pipe = pipeline(folder, schedule, kernels, microbatches=MICROBATCHES, loss_fn=judged)
    for rows in ROWS if kernels == "autograd" else ROWS[1:2]:
        torch.manual_seed(0)
        model, x = Model(), inputs(rows, LENGTH)
        target = torch.randn(rows, LENGTH, 3)
        output = model(*x)
        judged(output, target)[0].backward()
        result = pipe.step(*x, target=target)
        parts = [len(part) for part in torch.arange(rows).tensor_split(min(MICROBATCHES, rows))]
        cut = zip(output.detach().split(parts), target.split(parts), parts, strict=True)
        each = [(judged(*pair)[1], share / rows) for *pair, share in cut]
        if rank is None or result.loss is not None:
            assert list(result.metrics) == list(each[0][0])
            for name, metric in result.metrics.items():
                assert_close(metric, sum(weight * found[name] for found, weight in each))
                assert not metric.requires_grad
            assert_close(result.metrics["loss"], result.loss)
        else:
            assert result.metrics is None
        _assert_gradients(pipe, model)
    return "equal"


def _assert_gradients(pipe: Any, model: torch.nn.Module) -> None:
    whole = dict(model.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert_close(parameter.grad, whole[name].grad)
        parameter.grad = None


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return (output - target).square().sum(), {"hits": (output > target).sum()}


def sums(rank: int | None, folder: str, schedule: str, kernels: str = "eager") -> str:
    """With loss_reduction="sum" a step is that of the sum over the whole batch, metrics included."""
    pipe = pipeline(folder, schedule, kernels, microbatches=MICROBATCHES, loss_fn=summed, loss_reduction="sum")
    for rows in ROWS if kernels == "autograd" else ROWS[1:2]:
        torch.manual_seed(0)
        model, x = Model(), inputs(rows, LENGTH)
        target = torch.randn(rows, LENGTH, 3)
        loss, metrics = summed(model(*x), target)
        loss.backward()
        result = pipe.step(*x, target=target, return_losses=True)
        if rank is None or result.loss is not None:
            assert_close(result.loss, loss.detach())
            assert_close(result.losses.sum(), result.loss)
            assert result.metrics == metrics
        _assert_gradients(pipe, model)
    return "equal"
