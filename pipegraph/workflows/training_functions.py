"""The training functions of a model file: optimizer, scheduler, metrics, and functions for data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from pipegraph.cost.model_output import default_loss
from pipegraph.errors import PipegraphError, SourceError, user_line
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.runtime.loss_reduction import LossFunction
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.workflows.batch import source_loss

_SIGNATURES: Final = {
    "data": "data(rank, world)",
    "evaluation_data": "evaluation_data(rank, world)",
    "optimizer": "optimizer(parameters)",
    "scheduler": "scheduler(optimizer)",
    "metrics": "metrics(output, target)",
    "loss_weight": "loss_weight(target)",
}
_LEARNING_RATE: Final = 1e-3
_ADVICE: Final = "the same in Python, without pipegraph; --debug shows the traceback."


def training_function(source: ModelSource | None, name: str) -> Callable[..., Any] | None:
    """A function of a model file, one of `TrainingFunctions`; None if the file does not have it.

    An error in it becomes a SourceError that names the line. Raises SourceError if it is not a function.
    """
    function = None if source is None else getattr(source.training, name)
    if source is None or function is None:
        return None
    signature, where = _SIGNATURES[name], source.name
    if not callable(function):
        raise SourceError(
            f"{where}: {name} is a {type(function).__name__}, and to train it has to be a function, {signature}.",
            f"def {signature}: …; or another name for what it is now.",
        )

    def call(*arguments: Any) -> Any:
        with errors_named(f"{where}: {signature}"):
            return function(*arguments)

    return call


@contextmanager
def errors_named(subject: str, advice: str = _ADVICE) -> Iterator[None]:
    """Turn whatever the user's code raises into a SourceError that says what raised it, and its line."""
    try:
        yield
    except PipegraphError:
        raise
    except (Exception, SystemExit) as error:
        line = user_line(error)
        place = f", at {line}" if line else ""
        raise SourceError(f"{subject} raised {type(error).__name__}: {error}{place}", advice) from error


def loss_with_metrics(source: ModelSource | None) -> LossFunction:
    """The loss of a model file, with its metrics if it has some; by default `default_loss`."""
    if source is None:
        return default_loss
    loss_fn = source_loss(source)
    if training_function(source, "metrics") is None:
        return loss_fn
    metrics: Any = source.training.metrics  # itself, because it is traced

    def with_metrics(output: Any, target: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss_result = loss_fn(output, target)
        loss, loss_metrics = loss_result if isinstance(loss_result, tuple) else (loss_result, {})
        return loss, {**loss_metrics, **metrics(output, target)}

    return with_metrics


def make_optimizer(
    pipe: Pipeline, source: ModelSource | None, learning_rate: float | None
) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer and the scheduler of a model file; without them AdamW, and None.

    Raises:
        SourceError: a function raises, or returns something else; or both a learning rate and an optimizer are given.
    """
    make, make_scheduler = (training_function(source, name) for name in ("optimizer", "scheduler"))
    if make is None:
        rate = _LEARNING_RATE if learning_rate is None else learning_rate
        # A group may be empty, on a rank whose stages have no parameters, and an optimizer may not.
        optimizer: Any = torch.optim.AdamW([{"params": list(pipe.parameters())}], lr=rate)
    else:
        assert source is not None, "it has a function"
        if learning_rate is not None:
            raise SourceError(
                f"{source.name} has its own optimizer(parameters), and --learning-rate is that of AdamW without one.",
                "the learning rate in the file, or the file without optimizer.",
            )
        optimizer = make(list(pipe.parameters()))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SourceError(
                f"{source.name}: optimizer(parameters) returned a {type(optimizer).__name__}; it has to be one of "
                "torch's.",
                "return torch.optim.AdamW(parameters, lr=1e-3)",
            )
    scheduler = None if make_scheduler is None else make_scheduler(optimizer)
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise SourceError(
            f"scheduler(optimizer) returned a {type(scheduler).__name__}, which has no step().",
            "return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)",
        )
    return optimizer, scheduler
