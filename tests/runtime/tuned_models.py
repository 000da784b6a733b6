"""What users do to a model in training: averages of its weights, adapters, freezing. Alike for stages and the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime import precision_models as models

DECAY = 0.5


class AdaptedLinear(nn.Linear):
    """With a correction of rank 2."""

    adapter_in: nn.Parameter
    adapter_out: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.adapter_in), self.adapter_out)


def adapt(module: nn.Module) -> None:
    """Freeze everything, and give linear layers adapters."""
    module.requires_grad_(False)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.__class__ = AdaptedLinear
            layer.adapter_in = nn.Parameter(torch.linspace(-0.1, 0.1, 2 * layer.in_features).view(2, -1))
            layer.adapter_out = nn.Parameter(torch.zeros(layer.out_features, 2))


def average(optimizer: torch.optim.Optimizer) -> None:
    """Keep a moving average of each weight in the optimizer's state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            weight = parameter.detach()
            state["average"] = state["average"].lerp_(weight, 1 - DECAY) if "average" in state else weight.clone()


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have the averages in the place of the weights."""
    pairs = [(weight, optimizer.state[weight]) for group in optimizer.param_groups for weight in group["params"]]

    def swap() -> None:
        for parameter, state in pairs:
            parameter.data, state["average"] = state["average"], parameter.data

    swap()
    try:
        yield
    finally:
        swap()


def whole_step(model: nn.Module) -> float:
    """The loss of a step of the unsplit model, whose gradients are in `.grad`."""
    x, target = models.batch()
    pairs = zip(x.chunk(models.MICROBATCHES), target.chunk(models.MICROBATCHES), strict=True)
    losses = [models.loss(model(rows), aims) for rows, aims in pairs]
    for loss in losses:
        (loss / models.MICROBATCHES).backward()
    return torch.stack(losses).mean().item()


def trained(pipe: Any) -> list[nn.Parameter]:
    return [parameter for parameter in pipe.parameters() if parameter.requires_grad]


def train_adapters(rank: int, package: str) -> list[float | None]:
    """The losses on one of several ranks."""
    pipe = models.start(package, None, "zb-h1", parallelize_fn=adapt)
    return train(pipe, torch.optim.SGD(trained(pipe), lr=0.5))


def train(pipe: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float | None]:
    x, target = models.batch()
    losses = []
    for _ in range(steps):
        loss = pipe.step(x, target=target).loss
        losses.append(None if loss is None else loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
