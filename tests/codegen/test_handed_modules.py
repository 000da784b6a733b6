"""A ``forward`` that hands its module to a function or an object: the text of that is the text of the ``forward``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from tests.codegen.parity import differences, source, split

FUNCTIONS: dict[str, Callable[..., Any]] = {}


def dispatched(module_class: type[nn.Module]) -> type[nn.Module]:
    """Replace a ``forward`` by a choice among functions, as experts of transformers do."""
    original = module_class.forward

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = FUNCTIONS.get(self.kind, original)
        return run(self, *args, **kwargs)

    module_class.forward = forward
    module_class.gate = scaled_gate  # type: ignore[attr-defined]
    return module_class


def scaled_gate(self: Any, x: Tensor) -> Tensor:
    """Half of the features opens the other half."""
    first, second = x.chunk(2, dim=-1)
    return F.silu(first) * second


def inner_of(experts: Any, x: Tensor, scale: float = 1.0) -> Tensor:
    # from the features to those of the gate
    return experts.inner(x) * scale


def fast(self: Any, x: Tensor, weights: Tensor, scale: float = 0.5) -> Tensor:
    # the gate comes before the weights
    hidden = self.gate(inner_of(self, x, scale=scale))
    if self.bias is not None:
        hidden = hidden + self.bias
    return self.outer(hidden) * weights


def in_another_order(self: Any, weights: Tensor, x: Tensor) -> Tensor:
    return self.outer(self.gate(self.inner(weights))) * x


def by_mode(self: Any, x: Tensor, weights: Tensor) -> Tensor:
    return self.outer(self.gate(self.inner(x))) * weights * 2


FUNCTIONS |= {"fast": fast, "other order": in_another_order}


@dispatched
class Experts(nn.Module):
    """Weighs what its layers make."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.bias = kind, None
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return x * weights


class Mixture(nn.Module):
    def __init__(self, kind: str = "fast", layers: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(8, 1)
        self.layers = nn.ModuleList(Experts(kind) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.sigmoid(self.router(x))
        for layer in self.layers:
            x = x + layer(x, weights)
        return x


def batch(rows: int = 3, length: int = 5) -> Tensor:
    return torch.randn(rows, length, 8)


def test_the_text_of_a_function_is_that_of_the_forward(tmp_path: Path) -> None:
    package = split(tmp_path, Mixture(), (batch(),), cut="layers.1")
    text = source(package)
    assert (
        """
    def forward(self, x: Tensor, weights: Tensor, *, scale: float = 0.5) -> Tensor:
        # the gate comes before the weights
        hidden = self.gate(self.inner_of(x, scale=scale))
        return self.outer(hidden) * weights

    def inner_of(self, x: Tensor, scale: float = 1.0) -> Tensor:
        # from the features to those of the gate
        return self.inner(x) * scale

    def gate(self, x: Tensor) -> Tensor:
        \"\"\"Half of the features opens the other half.\"\"\"
        first, second = x.chunk(2, dim=-1)
        return F.silu(first) * second
"""
        in text
    ), text
    assert text.count("class Experts") == 1


@pytest.mark.parametrize("training", [True, False])
def test_it_trains_as_the_model_on_another_batch(training: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mixture().train(training)
    package = split(tmp_path, model, (batch(),), cut="layers.1")
    assert not differences(package, model, (batch(),))
    x, target = batch(10, 7), batch(10, 7)
    pipe = pipegraph.Pipeline(package, "zb-h1", 4, F.mse_loss, kernels="eager")
    loss = F.mse_loss(model(x), target)
    torch.testing.assert_close(pipe.step(x, target=target).loss, loss.detach())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close({name: parameter.grad for name, parameter in pipe.named_parameters()}, gradients)


def test_a_function_with_its_arguments_in_another_order_is_written_from_the_graph(tmp_path: Path) -> None:
    model = Mixture("other order")
    package = split(tmp_path, model, (batch(),), cut="layers.1")
    assert "self.gate(" not in source(package)
    assert not differences(package, model, (batch(),))


def is_trained(module: nn.Module) -> bool:
    return module.training


class ByMode(Experts):
    """Neither its class nor an operation shows that it asks for the mode."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        run = fast if is_trained(self) else by_mode
        return run(self, x, weights)


def test_functions_that_differ_by_mode_are_branches_written_from_the_graph(tmp_path: Path) -> None:
    model = Mixture()
    model.layers = nn.ModuleList(ByMode("") for _ in range(3))
    package = split(tmp_path, model, (batch(),), cut="layers.1")
    assert "if self.training:" in source(package)
    for train in (True, False):
        assert not differences(package, model, (batch(),), train=train)


class Window:
    """A processor whose numbers stand in the text, and whose other attributes no package has."""

    def __init__(self, steps: Any) -> None:
        self.steps, self.scale = steps, 0.25

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        return layer.inner(x.roll(self.steps, 1)) * self.scale


class Processed(nn.Module):
    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.processor, self.inner = processor, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(self, x)


@pytest.mark.parametrize(
    ("steps", "expected"), [(2, "return self.inner(x.roll(2, 1)) * 0.25"), ([2], "x.roll(2, dims=[1])")]
)
def test_numbers_of_a_processor_stand_in_the_text(steps: Any, expected: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(Processed(Window(steps)) for _ in range(2)))
    package = split(tmp_path, model, (batch(),), cut="2")
    assert expected in source(package)
    assert not differences(package, model, (batch(),))
