"""A model that cannot be captured is told the expression that is the cause, and not what followed from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import CaptureError
from tests.messages import refused

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Model(nn.Module):
    def __init__(self, do: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("sums", torch.ones(8))
        self.do = do

    def forward(self, x: Tensor) -> Any:
        return self.do(self, self.last(torch.tanh(self.first(x))))


class Result:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def momentum(model: Model, h: Tensor) -> Tensor:
    model.first.weight.data = model.first.weight.data * 0.9
    return h


def in_place_data(model: Model, h: Tensor) -> Tensor:
    model.sums.data.mul_(0.9).add_(h.detach().sum(0))
    return h * model.sums


def item_of_data(model: Model, h: Tensor) -> Tensor:
    model.sums.data[0] = h.detach().sum()
    return h * model.sums


def derivative(model: Model, h: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(h.square().sum(), model.first.weight, create_graph=True)
    return h + gradient.sum()


def backward(model: Model, h: Tensor) -> Tensor:
    h.square().sum().backward(retain_graph=True)
    return h


def distribution(model: Model, h: Tensor) -> Any:
    return torch.distributions.Normal(h, h.exp(), validate_args=False)


def checked_distribution(model: Model, h: Tensor) -> Tensor:
    return torch.distributions.Normal(h, h.exp(), validate_args=True).mean


def result(model: Model, h: Tensor) -> Any:
    return Result(h)


@pytest.mark.parametrize(
    ("do", "parts", "advice"),
    [
        (momentum, ["assigns", ".data"], "with torch.no_grad"),
        (in_place_data, ["changes", ".data"], "with torch.no_grad"),
        (item_of_data, ["changes", ".data"], "with torch.no_grad"),
        (derivative, ["differentiates"], "in loss_fn"),
        (backward, ["differentiates"], "in loss_fn"),
        (distribution, ["returns", "Normal"], "the distribution in loss_fn"),
        (checked_distribution, ["torch.distributions", "by their values"], "validate_args=False"),
        (result, ["returns", "Result"], "tuples, lists and dicts"),
    ],
)
def test_the_cause_is_named(do: Any, parts: list[str], advice: str) -> None:
    with refused(CaptureError, "Model cannot be captured", *parts, advice=advice) as raised:
        pipegraph.capture(Model(do), (X,))
    if do not in (distribution, result):
        lines = str(raised.value).splitlines()
        start, stop = do.__code__.co_firstlineno, do.__code__.co_firstlineno + 4
        assert any(f"test_reasons.py:{number}" in lines[1] for number in range(start, stop))


def test_a_cache_of_transformers_is_switched_off() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=16
    )
    model, tokens = transformers.LlamaForCausalLM(config), torch.arange(16).reshape(2, 8)
    with refused(CaptureError, "LlamaForCausalLM", "DynamicCache", advice="use_cache=False"):
        pipegraph.capture(model, kwargs={"input_ids": tokens})
    pipegraph.capture(model, kwargs={"input_ids": tokens, "use_cache": False})


@pytest.mark.parametrize("to_sparse", [Tensor.to_sparse, Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_buffers_are_refused(to_sparse: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.register_buffer("edges", to_sparse(torch.eye(8)))
    with refused(CaptureError, "buffer edges", "torch.sparse", advice="to_dense"):
        pipegraph.capture(model, (X,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_of_torch_jit_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    with refused(CaptureError, "1 is", "torch.jit", advice="torch.jit.script"):
        pipegraph.capture(model, (X,))
