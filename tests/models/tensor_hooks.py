"""Models whose forward adds hooks to tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

FACTOR = 0.25
LOG: list[Tensor] = []


def clip_rows(gradient: Tensor, limit: float) -> Tensor:
    size = gradient.abs().mean(-1, keepdim=True)
    return torch.where(size > limit, gradient * limit / size, gradient)


def quarter(gradient: Tensor) -> Tensor:
    return gradient * FACTOR


def log(gradient: Tensor) -> None:
    LOG.append(gradient)


class Scaled(nn.Module):
    """A residual block that scales the gradient of its inner value."""

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        if h.requires_grad:
            h.register_hook(lambda grad: grad * self.factor)
        return x + self.down(h)


class Trained(Scaled):
    """Adds its hook in training mode alone."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        if self.training:
            h.register_hook(quarter)
        return x + self.down(h)


class HooksItsInput(Scaled):
    """Its caller reads the tensor with the hook as well."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(quarter)
        return self.down(self.up(x))


class ReadBefore(Scaled):
    """Reads the tensor before it adds the hook, which takes the gradient of that too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        gate = h.sigmoid()
        h.register_hook(quarter)
        return x + self.down(h * gate)


class TwoHooks(Scaled):
    """The second hook takes what the first returns."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.register_hook(partial(clip_rows, limit=1e-3))
        h.register_hook(lambda grad: grad + 1e-3)
        return x + self.down(h)


class Masks(Scaled):
    """Its hook reads a tensor that the forward computes."""

    def forward(self, x: Tensor) -> Tensor:
        kept = (x.mean(-1, keepdim=True) > 0).to(x.dtype)
        h = self.up(x)
        h.register_hook(lambda grad: grad * kept)
        return x + self.down(h)


class ClipsNorm(Scaled):
    """A hook of the gradient of the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.register_hook(lambda grad: grad * (5 / grad.norm()).clamp(max=1))
        return x + self.down(h)


class Calls(Scaled):
    """Its hook calls a function of the model, with a number of the module."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.register_hook(lambda grad: clip_rows(grad, limit=self.factor * 1e-3))
        return x + self.down(h)


class WithoutGradients(Scaled):
    """Adds its hook where gradients are switched off."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.no_grad():
            h.register_hook(quarter)
            shift = h.mean(-1, keepdim=True)
        return x + self.down(h) - shift


RIGHT = (Scaled, Trained, HooksItsInput, ReadBefore, TwoHooks, Masks, Calls, WithoutGradients)


class Residual(nn.Module):
    """Adds what blocks compute, also to what they are given."""

    def __init__(self, kind: type[Scaled], layers: int = 3, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(kind(width, 0.5 + index / 8) for index in range(layers))
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return self.last(h)


class Hooked(nn.Module):
    """Does something with a hook that no stage has."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(8, 8), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.linear(x))


def logs(model: Hooked, h: Tensor) -> Tensor:
    h.register_hook(log)
    return h


def logged(gradient: Tensor) -> Tensor:
    LOG.append(gradient)
    return gradient * 2


def logs_in_a_function(model: Hooked, h: Tensor) -> Tensor:
    h.register_hook(lambda grad: logged(grad))
    return h


def draws(model: Hooked, h: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad + torch.randn_like(grad))
    return h


def returns_nothing(model: Hooked, h: Tensor) -> Tensor:
    h.register_hook(lambda grad: None)
    return h


def hooks_parameter(model: Hooked, h: Tensor) -> Tensor:
    model.linear.weight.register_hook(quarter)
    return h


def removes(model: Hooked, h: Tensor) -> Tensor:
    handle = h.register_hook(quarter)
    handle.remove()
    return h


def writes(model: Hooked, h: Tensor) -> Tensor:
    h.register_hook(quarter)
    h += 1
    return h


def writes_gradient(model: Hooked, h: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad.mul_(2))
    return h


def changes_shape(model: Hooked, h: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad.sum(0))
    return h


REFUSED = (
    draws,
    logs,
    logs_in_a_function,
    returns_nothing,
    hooks_parameter,
    removes,
    writes,
    writes_gradient,
    changes_shape,
)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(kind, 1) for kind in RIGHT))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


_generator = torch.Generator().manual_seed(0)
example_inputs = (torch.randn(4, 5, 8, generator=_generator),)
example_target = torch.randn(4, 5, 8, generator=_generator)
