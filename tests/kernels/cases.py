"""Stages that do all kinds of things, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kernels.stages import Function, Layer, Layers, linear, tokens, x


def _no_grad(stage: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = stage.a(x).sigmoid()
    return stage.b(x) * scale


def _autocast(stage: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = stage.a(x)
    return stage.b(y.float())


def _in_place(stage: Any, x: Tensor) -> Tensor:
    y = stage.a(x)
    y[:, :2] = 0
    y.add_(1)
    y[1:].mul_(x[1:])
    return stage.b(y)


class Doubled(torch.autograd.Function):
    """A custom gradient that is not the derivative of the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def tied() -> nn.Module:
    stage = Function(lambda s, x: s.b(torch.tanh(s.a(x))), **linear("a", "b"))
    stage.b.weight = stage.a.weight
    return stage


def frozen() -> nn.Module:
    stage = Layers()
    stage.layers[1].up.requires_grad_(False)
    stage.head.weight.requires_grad_(False)
    return stage


STAGES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "layers": (Layers, (x,)),
    "one layer": (lambda: Layers(1), (x,)),
    "dropout": (lambda: Layers(p=0.5), (x,)),
    "layers that differ": (lambda: Function(lambda s, x: s.b(s.a(x)), a=Layer(0.1), b=Layer(0.7)), (x,)),
    "a layer called again": (lambda: Function(lambda s, x: s.a(s.a(s.a(x))), a=Layer(0.5)), (x,)),
    "tied": (tied, (x,)),
    "frozen": (frozen, (x,)),
    "all frozen": (lambda: Layers().requires_grad_(False), (x,)),
    "integers": (lambda: Function(lambda s, i, x: s.e(i) * s.a(x), e=nn.Embedding(5, 8), **linear("a")), (tokens, x)),
    "an unused input": (lambda: Function(lambda s, x, y: s.a(x), **linear("a")), (x, x)),
    "an unused parameter": (lambda: Function(lambda s, x: s.a(x), **linear("a", "b")), (x,)),
    "an input as output": (lambda: Function(lambda s, x: (x, s.a(x)), **linear("a")), (x,)),
    "an output twice": (lambda: Function(lambda s, x: (y := s.a(x), y), **linear("a")), (x,)),
    "a view of an input": (lambda: Function(lambda s, x: (x.t(), s.a(x)[1:], x[0]), **linear("a")), (x,)),
    "views of one value": (lambda: Function(lambda s, x: s.a(x).chunk(2, -1), **linear("a")), (x,)),
    "a transposed output": (lambda: Function(lambda s, x: s.a(x).t(), **linear("a")), (x,)),
    "an expanded output": (lambda: Function(lambda s, x: s.a(x).sum().expand(3, 2), **linear("a")), (x,)),
    "an integer output": (lambda: Function(lambda s, x: (s.a(x).argmax(-1), s.b(x)), **linear("a", "b")), (x,)),
    "a detached output": (lambda: Function(lambda s, x: (s.a(x), s.a(x).detach()), **linear("a")), (x,)),
    "a parameter as output": (lambda: Function(lambda s, x: (s.a.weight, s.a(x)), **linear("a")), (x,)),
    "a gradient that is the output's": (lambda: Function(lambda s, x: s.p + x), (x,)),
    "no_grad": (lambda: Function(_no_grad, **linear("a", "b")), (x,)),
    "autocast": (lambda: Function(_autocast, **linear("a", "b")), (x,)),
    "writes": (lambda: Function(_in_place, **linear("a", "b")), (x,)),
    "an autograd function": (lambda: Function(lambda s, x: Doubled.apply(s.a(x)), **linear("a")), (x,)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)), (x,)),
    "batch norm in blocks": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))),
        (x,),
    ),
    "batch norm in evaluation mode": (lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)).eval(), (x,)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 2, 2)),
        (torch.randn(2, 2, 8, 8),),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (torch.randn(2, 5, 8),)),
    "an RNN": (lambda: Function(lambda s, x: s.r(x)[0], r=nn.LSTM(8, 4)), (torch.randn(5, 2, 8),)),
    "a constant": (lambda: Function(lambda s, x: s.a(x) * torch.tensor([2.0] * 8), **linear("a")), (x,)),
    "an expanded gradient": (lambda: Function(lambda s, x: s.p.sum() * x.sum() + x), (x,)),
    # Without memory softplus has the strides of its output, and with memory those of what arrives.
    "a transposed gradient": (
        lambda: Function(
            lambda s, x: F.softplus(s.a(x)).transpose(1, 2).contiguous() * s.p,
            p=nn.Parameter(torch.randn(8, 5)),
            **linear("a"),
        ),
        (torch.randn(2, 5, 8),),
    ),
    "an output that is no tensor": (lambda: Function(lambda s, x: (s.a(x), None), **linear("a")), (x,)),
}


def build(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    make_stage, inputs = STAGES[name]
    stage = make_stage()
    if name in ("a gradient that is the output's", "an expanded gradient"):
        stage.p = nn.Parameter(torch.randn(4, 8))
    return stage, inputs
