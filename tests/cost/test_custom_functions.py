"""What custom autograd Functions cost: their forward and their backward, as they are traced; else their bytes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from tests.messages import warned
from tests.models.custom_functions import Quantizer, stack

WIDTH = 64


class Product(torch.autograd.Function):
    """A product whose backward is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient.clamp(-1, 1) @ weight, gradient.t() @ x


class AsksForValues(Product):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_input, of_weight = Product.backward(ctx, gradient)
        return (of_input, of_weight) if gradient.abs().max() < 1 else (of_input / 2, of_weight)


class Layer(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight)


def linear(_: Any) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


@pytest.mark.parametrize("function", [Product, AsksForValues])
def test_a_function_costs_what_its_operations_cost(function: Any) -> None:
    x = torch.randn(32, WIDTH)
    models = [nn.Sequential(*(layer(function) for _ in range(4))) for layer in (Layer, linear)]
    untraced = function is AsksForValues
    with warned("cannot be traced", "twice the forward") if untraced else nullcontext():
        plans = [pipegraph.plan(pipegraph.capture(model, (x,)), stages=2) for model in models]
    assert [cost.flops for cost in plans[0].costs] == [cost.flops for cost in plans[1].costs] != [0, 0]


def test_a_model_of_elementwise_functions_is_balanced() -> None:
    plan = pipegraph.plan(pipegraph.capture(stack(Quantizer), (torch.randn(32, 5, 8),)), stages=2)
    assert [str(point) for point in plan.points] == ["2"]
