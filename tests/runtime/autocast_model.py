"""A step in a region of autocast, and what crosses between its stages, in one process or several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.runtime.pipeline import Pipeline
from tests.runtime import precision_models as models


class Crossing:
    """Notes the dtypes of what the second stage is given: a residual, and what a product of matrices has made."""

    def __init__(self, pipe: Pipeline) -> None:
        self.dtypes: list[str] = []
        if 1 in pipe.stages:
            pipe.stages[1].register_forward_pre_hook(self._note)

    def _note(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.dtypes += [str(tensor.dtype).removeprefix("torch.") for tensor in args]


def step(package: str, kernels: str, **options: Any) -> tuple[float | None, dict[str, Tensor], list[str]]:
    """The loss, the gradients and the dtypes that crossed, of a step under autocast after one without it."""
    pipe = models.start(package, None, "1f1b", kernels=kernels, **options)
    crossing = Crossing(pipe)
    x, target = models.batch()
    pipe.step(x, target=target)
    for parameter in pipe.parameters():
        parameter.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        loss = pipe.step(x, target=target).loss
        pipe.evaluate(x, target=target)
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}
    return None if loss is None else loss.item(), gradients, crossing.dtypes


def on_rank(rank: int, package: str, kernels: str) -> Any:
    return step(package, kernels)


def only_on(rank: int, package: str, chosen: int) -> None:
    """A step that the ranks make in different regions."""
    pipe = models.start(package, None, "1f1b")
    x, target = models.batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == chosen):
        pipe.step(x, target=target)


def reference() -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of the unsplit model under autocast, for the microbatches of a step."""
    model = models.model(has_norm=False)
    x, target = models.batch()
    losses = []
    with torch.autocast("cpu", torch.bfloat16):
        for rows, aims in zip(x.chunk(models.MICROBATCHES), target.chunk(models.MICROBATCHES), strict=True):
            losses.append(models.loss(model(rows), aims))
    for loss in losses:
        (loss / models.MICROBATCHES).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return torch.stack(losses).mean().item(), gradients
