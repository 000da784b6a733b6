"""A model that is captured in one dtype and priced in another costs what it does if it is captured in that one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipegraph
from pipegraph.cost.hardware import Hardware
from pipegraph.cost.price import price
from pipegraph.graph.conversion import converted, dtype_of

A100 = Hardware.load("a100")
FIGURES = (
    "forward", "input_grad", "weight_grad", "saved_bytes", "weight_saved_bytes", "parameter_bytes", "boundary_bytes",
    "buffer_bytes", "transient_bytes",
)  # fmt: skip


class Norm(nn.Module):
    """Computes in float32, whatever the model's dtype is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(), nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("scale", torch.linspace(0, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[1], 1, dtype=x.dtype)
        return x + mask + self.down(F.silu(self.up(self.norm(x) * self.scale)))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def captured(dtype: torch.dtype) -> pipegraph.graph.captured.Captured:
    torch.manual_seed(0)
    return pipegraph.capture(Layers().to(dtype), (torch.randint(50, (2, 8)),))


@pytest.mark.parametrize(
    ("dtype", "other"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float16)],
)
def test_it_costs_what_a_capture_in_that_dtype_does(dtype: torch.dtype, other: torch.dtype) -> None:
    model = captured(dtype)
    assert (dtype_of(model), dtype_of(converted(model, other))) == (dtype, other)
    costs, expected_costs = (
        price(same_model, hardware=A100).costs for same_model in (converted(model, other), captured(other))
    )
    assert len(costs) == len(expected_costs)
    for cost, expected in zip(costs, expected_costs, strict=True):
        assert {name: getattr(cost, name) for name in FIGURES} == {name: getattr(expected, name) for name in FIGURES}


def test_the_model_stays_as_it_is_and_is_converted_once() -> None:
    model = captured(torch.float32)
    half = converted(model, torch.bfloat16)
    assert converted(model, torch.bfloat16) is half and converted(model, torch.float32) is model
    assert dtype_of(model) is torch.float32
    values = [(node, node.meta["val"]) for node in half.nodes if isinstance(node.meta["val"], Tensor)]
    floats = [node for node, value in values if value.dtype == torch.float32]
    assert {node.meta["path"][-1][1].rpartition(".")[2] for node in floats} == {"norm"}
