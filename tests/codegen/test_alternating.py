"""Layers of two kinds in a fixed rhythm are one loop that tells its turns apart, where that says more than a list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.codegen.layers import Row, batch
from tests.codegen.parity import differences, forward_lines, split
from tests.slow import cases

pytestmark = pytest.mark.usefixtures("from_graph")


class Layer(nn.Module):
    """Scales by a mask, and adds another where it gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor, shift: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.linear(x)) * mask
        return y if shift is None else y + shift


Arguments = Callable[[int, Tensor, Tensor], tuple[Tensor, ...]]


class Rhythm(Row):
    """Hands each layer what ``arguments`` gives for its number, then the result of a last layer."""

    def __init__(self, count: int, arguments: Arguments) -> None:
        torch.manual_seed(0)
        super().__init__([Layer() for _ in range(count)])
        self.head = nn.Linear(8, 8)
        self.arguments = arguments

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, *self.arguments(number, a, b))
        return self.head(x)


def written(arguments: Arguments, count: int, cut: str, tmp_path: Path, stage: int = 0) -> list[str]:
    model, inputs = Rhythm(count, arguments), (batch(), batch(3, 8) + 1, batch(3, 8) - 1)
    package = split(tmp_path, model, inputs, cut=cut)
    assert differences(package, model, inputs) == []
    return forward_lines(package, stage)


def test_one_argument_takes_turns(tmp_path: Path) -> None:
    assert written(lambda i, a, b: (b if i % 2 else a,), 5, "head", tmp_path) == [
        "for i, layer in enumerate(self.layers):",
        "    x = layer(x, b if i % 2 else a)",
        "return x",
    ]


def test_every_third_layer_and_the_first_is_one(tmp_path: Path) -> None:
    assert written(lambda i, a, b: (a if i % 3 == 0 else b,), 7, "head", tmp_path) == [
        "for i, layer in enumerate(self.layers):",
        "    x = layer(x, a if i % 3 == 0 else b)",
        "return x",
    ]


def test_a_later_stage_counts_on(tmp_path: Path) -> None:
    assert written(lambda i, a, b: (b if i % 2 else a,), 7, "layers.3", tmp_path, stage=1)[:-1] == [
        "for i in range(3, 7):",
        "    x = self.layers[str(i)](x, b if i % 2 else a)",
    ]


def test_several_arguments_take_turns(tmp_path: Path) -> None:
    assert written(lambda i, a, b: (b, a) if i % 4 == 3 else (a, b), 9, "head", tmp_path) == [
        "for i, layer in enumerate(self.layers):",
        "    if i % 4 == 3:",
        "        x = layer(x, b, a)",
        "    else:",
        "        x = layer(x, a, b)",
        "return x",
    ]


def test_an_argument_comes_and_goes(tmp_path: Path) -> None:
    assert written(lambda i, a, b: (a, b) if i % 3 == 2 else (a,), 9, "head", tmp_path) == [
        "for i, layer in enumerate(self.layers):",
        "    if i % 3 == 2:",
        "        x = layer(x, a, b)",
        "    else:",
        "        x = layer(x, a)",
        "return x",
    ]
    assert "[Layer2() if i % 3 == 2 else Layer() for i in range(9)]" in (tmp_path / "package/stage_0.py").read_text()


def test_what_breaks_the_rhythm_ends_the_loop(tmp_path: Path) -> None:
    assert written(lambda i, a, b: (b if i % 2 or i == 6 else a,), 7, "head", tmp_path) == [
        "for i in range(6):",
        "    x = self.layers[i](x, b if i % 2 else a)",
        "return self.layers[6](x, b)",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        lambda i, a, b: (b if i in (1, 2, 5) else a,),
        lambda i, a, b: ((a, b, a + b)[i % 3],),
        lambda i, a, b: (a,) if i < 3 else (b,),
    ],
)
def test_without_a_rhythm_no_turn_is_told_apart(arguments: Arguments, tmp_path: Path) -> None:
    assert not any(" if " in line for line in written(arguments, 7, "head", tmp_path))


def test_few_layers_are_listed(tmp_path: Path) -> None:
    assert written(lambda i, a, b: (b if i % 2 else a,), 3, "head", tmp_path) == [
        "x = self.layers[0](x, a)",
        "x = self.layers[1](x, b)",
        "return self.layers[2](x, a)",
    ]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.left(x)) + y, self.right(y) - x


class Crossed(Row):
    """Two values that each layer takes in one order or the other."""

    def __init__(self, swaps: Callable[[int], bool]) -> None:
        torch.manual_seed(0)
        super().__init__([Pair() for _ in range(9)])
        self.swaps = swaps

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        for number, layer in enumerate(self.layers):
            x, y = layer(y, x) if self.swaps(number) else layer(x, y)
        return x * y


@pytest.mark.parametrize("swaps", [lambda i: i % 2 == 0, lambda i: i % 2 == 1, lambda i: i in (0, 3, 4, 7)])
@pytest.mark.parametrize("cut", cases(["layers.3", "layers.1,layers.6"], slow=["layers.3"]))
def test_two_values_that_change_places(swaps: Callable[[int], bool], cut: str, tmp_path: Path) -> None:
    model, inputs = Crossed(swaps), (batch(),)
    assert differences(split(tmp_path, model, inputs, cut=cut), model, inputs) == []


def test_every_second_turn_changes_places(tmp_path: Path) -> None:
    package = split(tmp_path, Crossed(lambda i: i % 2 == 0), (batch(),), cut="layers.8")
    lines = forward_lines(package)
    assert [line for line in lines if "for" in line] == ["for i, layer in enumerate(self.layers):"]
