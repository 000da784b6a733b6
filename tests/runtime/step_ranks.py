"""Results of steps, compared with the whole model: functions for one process, or for each rank of `ranks.run`."""

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
    """A loss with metrics: one with its own gradient, one of integers, one that is a constant, the loss itself."""
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
        weighted_metrics = [(judged(*pair)[1], share / rows) for *pair, share in cut]
        assert result.loss is not None
        if rank is None or len(pipe.package.manifest.stages) - 1 in pipe.stages:
            assert list(result.metrics) == list(weighted_metrics[0][0])
            for name, metric in result.metrics.items():
                assert_close(metric, sum(weight * part_metrics[name] for part_metrics, weight in weighted_metrics))
                assert not metric.requires_grad
            assert_close(result.metrics["loss"], result.loss)
        else:
            assert result.metrics is None
        _assert_gradients(pipe, model)
    return "equal"


def _assert_gradients(pipe: Any, model: torch.nn.Module) -> None:
    parameters = dict(model.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert_close(parameter.grad, parameters[name].grad)
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
        assert_close(result.loss, loss.detach())
        if rank is None or len(pipe.package.manifest.stages) - 1 in pipe.stages:
            assert_close(result.losses.sum(), result.loss)
            assert result.metrics == metrics
        _assert_gradients(pipe, model)
    return "equal"


def evaluation(rank: int | None, folder: str, schedule: str, kernels: str = "eager") -> str:
    """Between two steps, for batches of any size."""
    pipe = pipeline(folder, schedule, kernels, microbatches=MICROBATCHES, loss_fn=judged)
    for rows in ROWS if kernels == "autograd" else ROWS[1:2]:
        x, target = inputs(rows, LENGTH), torch.randn(rows, LENGTH, 3)
        trained = pipe.step(*x, target=target, return_outputs=True, return_losses=True)
        gradients = [parameter.grad.clone() for parameter in pipe.parameters()]
        outcome = pipe.evaluate(*x, target=target, return_outputs=True, return_losses=True)
        assert_close(
            (outcome.loss, outcome.losses, outcome.outputs, outcome.metrics),
            (trained.loss, trained.losses, trained.outputs, trained.metrics),
        )
        assert pipe.evaluate(*x, target=target).outputs is None
        assert all(map(torch.equal, gradients, (parameter.grad for parameter in pipe.parameters())))
        if rank is not None:
            assert (outcome.metrics is None) == (len(pipe.package.manifest.stages) - 1 not in pipe.stages)
    return "equal"


def loss_on_the_last_rank(rank: int, folder: str) -> str:
    """Every rank gets the loss, to the last digit, or without its broadcast the last rank alone."""
    pipe = pipeline(folder, microbatches=2, loss_fn=judged if rank == 1 else None)
    x = torch.ones(4, 8)
    for call in (pipe.step, pipe.evaluate):
        result = call(x, target=x)
        assert result.loss.dtype == torch.float32
        assert (result.metrics is None) == (rank == 0)
        assert len({row[0] for row in pipe.gather([float(result.loss)])}) == 1
        assert pipe.eval(x) is None or rank == 1
    alone = pipeline(folder, microbatches=2, loss_fn=judged if rank == 1 else None, broadcast_loss=False)
    assert (alone.step(x, target=x).loss is None) == (rank == 0)
    return "done"


CUTS = ([3, 5, 2], [4, 4, 4], [1, 2, 1, 6], [7])


def cut(tensor: Tensor, rows: list[int], dim: int = 0) -> list[Tensor]:
    return [*tensor.split(rows, dim)]


def given_cut(rank: int | None, folder: str, schedule: str, kernels: str = "autograd", alone: bool = False) -> str:
    """Lists of microbatches are the step of the model on the whole batch; `alone`: a rank has its stages' inputs."""
    pipe = pipeline(folder, schedule, kernels, microbatches=3, loss_fn=judged)
    manifest = pipe.package.manifest
    input_names = {name for stage in pipe.stages for name in manifest.stages[stage].inputs}
    is_last = len(manifest.stages) - 1 in pipe.stages
    for rows in CUTS if kernels == "autograd" else [[4, 4, 2]]:
        torch.manual_seed(0)
        model, (x, bias, table) = Model(), inputs(sum(rows), LENGTH)
        target = torch.randn(sum(rows), LENGTH, 3)
        output = model(x, bias, table)
        loss = judged(output, target)[0]
        loss.backward()
        cut_inputs = {"x": cut(x, rows), "bias": cut(bias, rows, 1), "table": table}
        if alone:
            cut_inputs = {name: argument if name in input_names else None for name, argument in cut_inputs.items()}
        # A rank without a list has to be told the number of microbatches, unless it is the number of the pipeline.
        count = len(rows) if len(rows) != 3 else None
        targets = cut(target, rows) if is_last or not alone else None
        result = pipe.step(*cut_inputs.values(), target=targets, return_outputs=True, microbatches=count)
        _assert_gradients(pipe, model)
        if is_last:
            assert_close((result.loss, result.outputs), (loss.detach(), output.detach()))
        evaluated = pipe.evaluate(*cut_inputs.values(), target=targets, microbatches=count)
        assert evaluated.loss == result.loss
    return "equal"


def given_otherwise(rank: int, folder: str) -> Any:
    """Rank 0 is given whole tensors, rank 1 lists."""
    pipe = pipeline(folder, microbatches=4, loss_fn=judged, timeout=20)
    x, bias, table = inputs(10, LENGTH)
    target = torch.zeros(10, LENGTH, 3)
    rows = [3, 3, 2, 2]  # as whole tensors are cut
    pipe.step(cut(x, rows) if rank == 1 else x, bias, table, target=cut(target, rows))
    pipe.step(cut(x, [3, 3, 3, 1]) if rank == 1 else x, bias, table, target=target)
