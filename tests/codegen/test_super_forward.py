"""Classes that derive from a layer of torch and call its ``forward`` keep that base, with their author's text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.codegen.parity import differences, source, split


class Learned(nn.Embedding):
    """Positions after an offset."""

    def __init__(self, count: int, width: int) -> None:
        self.offset = 2
        super().__init__(count + 2, width, padding_idx=1)

    def forward(self, positions: Tensor) -> Tensor:
        # as the pretrained model has them
        return super().forward(positions + self.offset)


class Scaled(nn.Linear):
    def __init__(self, width: int, factor: float) -> None:
        super().__init__(width, width, bias=False)
        self.factor = factor
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.factor
        return y + x + self.shift


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Derived(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions = Learned(12, 8)
        self.layers = nn.ModuleList([Scaled(8, 0.5), Scaled(8, 2.0), Derived(), Scaled(8, 0.5)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, inputs = Model(), (torch.randn(3, 5, 8),)
    package = split(tmp_path_factory.mktemp("super"), model, inputs, cut="layers.1")
    for train in (True, False):
        assert differences(package, model, inputs, train=train) == []
    stages = [package.load_stage(index) for index in range(2)]
    x = torch.randn(2, 7, 8)  # of other sizes than the example
    torch.testing.assert_close(stages[1](stages[0](x)), model(x))
    names = [name for stage in stages for name in stage.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    return source(package)


def test_the_base_makes_its_parameters(text: str) -> None:
    assert "class Learned(nn.Embedding):" in text
    assert "super().__init__(14, 8, padding_idx=1)\n        self.offset = 2\n" in text
    assert "return super().forward(positions + self.offset)" in text


def test_numbers_and_other_parameters_stay_the_constructor_s(text: str) -> None:
    assert "class Scaled(nn.Linear):" in text
    assert "def __init__(self, factor):\n        super().__init__(8, 8, bias=False)\n" in text
    assert "self.shift = nn.Parameter(torch." in text
    assert "self.weight" not in text


def test_a_base_of_the_model_is_written_from_the_graph(text: str) -> None:
    assert "return self.norm(x) * 2" in text


def test_weights_are_initialised_as_the_model_s(tmp_path: Path) -> None:
    model, inputs = Model(), (torch.randn(3, 5, 8),)
    package = split(tmp_path, model, inputs, cut="layers.1")
    stage = package.load_stage(0, weights=False, seed=0)
    weight = stage.positions.weight.detach()
    assert weight.shape == (14, 8)
    assert 0.5 < float(weight[2:].std()) < 1.5  # of nn.Embedding
