"""Classes that differ in numbers only are one class, with the numbers as arguments under the model's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.codegen.layers import Block, Row, batch
from tests.codegen.parity import differences, forward_lines, split

pytestmark = pytest.mark.usefixtures("from_graph")


class Windowed(nn.Module):
    """Holds a number that its ``forward`` uses."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).roll(self.window, -1)


class Tall(nn.Module):
    """Holds layers whose numbers follow from its own."""

    def __init__(self, width: int, scale: float, biased: bool = True) -> None:
        super().__init__()
        self.widen = nn.Linear(8, width, bias=biased)
        self.norm = nn.LayerNorm(width, eps=1e-3 * scale)
        self.narrow = nn.Linear(width, 8)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.norm(self.widen(x)).tanh()) * self.scale


class Holder(nn.Module):
    """A class around another, equal to its like but for the numbers inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Tall(width, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


class Sum(nn.Module):
    """Not what its like computes, under the same name of class; no attribute says which of the two it is."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._adds = adds

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x if self._adds else self.linear(x) * x


class Named(nn.Module):
    """A child whose name reads like a call of a class."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.add_module("Windowed2()", nn.Linear(8, width))
        self.add_module("3", nn.Linear(width, 8))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


class Attends(nn.Module):
    """Attention that is causal or is not."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.is_decoder = self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return F.scaled_dot_product_attention(y, y, y, is_causal=self.is_causal)


class Many(nn.Module):
    """Holds eight numbers that have nothing to do with each other."""

    def __init__(self, first: int) -> None:
        super().__init__()
        widths = [first * prime for prime in (2, 3, 5, 7, 11, 13, 17, 19)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip([8, *widths], [*widths, 8], strict=True))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def blocks(folder: Path) -> str:
    return (folder / "package" / "blocks.py").read_text(encoding="utf-8")


def constructors(folder: Path) -> list[str]:
    return [line.strip() for line in blocks(folder).splitlines() if line.startswith(("class ", "    def __init__"))]


def test_a_number_of_forward_becomes_an_attribute(tmp_path: Path) -> None:
    package = split(tmp_path, Row([Windowed(i % 2) for i in range(4)]), (batch(),))
    assert constructors(tmp_path) == ["class Windowed(nn.Module):", "def __init__(self, window):"]
    assert "        self.window = window\n" in blocks(tmp_path)
    assert "return self.linear(x).roll(self.window, dims=[-1])" in blocks(tmp_path)
    stage = (package.path / "stage_0.py").read_text()
    assert "self.layers = nn.ModuleList([Windowed(0), Windowed(1)])" in stage
    assert forward_lines(package) == ["for layer in self.layers:", "    x = layer(x)", "return x"]


def test_numbers_of_inner_modules_become_arguments(tmp_path: Path) -> None:
    model = Row([Tall(4, 0.5), Tall(6, 2.0), Block(), Tall(4, 2.0, biased=False)])
    split(tmp_path, model, (batch(),))
    assert "def __init__(self, width, scale, eps, biased=True):" in constructors(tmp_path)
    assert "self.widen = nn.Linear(8, width, bias=biased)" in blocks(tmp_path)
    assert "self.norm = nn.LayerNorm(width, eps=eps)" in blocks(tmp_path)


def test_classes_around_merged_classes_are_merged(tmp_path: Path) -> None:
    split(tmp_path, Row([Holder(4), Holder(6), Holder(4)]), (batch(),))
    assert constructors(tmp_path) == [
        "class Tall(nn.Module):",
        "def __init__(self, width):",
        "class Holder(nn.Module):",
        "def __init__(self, width):",
    ]
    assert "self.inner = Tall(width)" in blocks(tmp_path)


def test_a_switch_of_a_function_becomes_an_argument(tmp_path: Path) -> None:
    split(tmp_path, Row([Attends(False), Attends(True)]), (batch(2, 3, 8),))
    assert constructors(tmp_path) == ["class Attends(nn.Module):", "def __init__(self, is_causal=False):"]
    assert "F.scaled_dot_product_attention(y, y, y, is_causal=self.is_causal)" in blocks(tmp_path)


@pytest.mark.parametrize(("copies", "classes"), [(2, 2), (3, 1)])
def test_more_copies_are_worth_more_arguments(copies: int, classes: int, tmp_path: Path) -> None:
    split(tmp_path, Row([Many(first) for first in range(1, copies + 1)]), (batch(),), cut=1)
    assert sum(line.startswith("class ") for line in constructors(tmp_path)) == classes


def test_classes_that_compute_differently_stay_apart(tmp_path: Path) -> None:
    split(tmp_path, Row([Sum(True), Sum(False), Sum(True)]), (batch(),))
    assert constructors(tmp_path)[::2] == ["class Sum(nn.Module):", "class Sum2(nn.Module):"]


def test_a_name_that_reads_like_a_class_stays_a_name(tmp_path: Path) -> None:
    model = Row([Windowed(0), Windowed(1), Named(4), Named(5)])
    package = split(tmp_path, model, (batch(),), cut="layers.2")
    assert differences(package, model, (batch(),)) == []
    assert 'self["Windowed2()"] = nn.Linear(8, out_features)' in blocks(tmp_path)


@pytest.mark.parametrize(
    "layers",
    [
        [Windowed(0), Windowed(3), Windowed(3)],
        [Tall(4, 0.5), Tall(6, 2.0), Tall(4, 2.0, biased=False)],
        [Holder(4), Holder(6), Tall(3, 1.5)],
        [Attends(True), Attends(False), Attends(True)],
        [Sum(True), Sum(False), Sum(True)],
        [nn.Conv1d(8, 8, 3, padding=1), nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 3, padding=2, dilation=2)],
    ],
    ids=lambda layers: type(layers[0]).__name__,
)
def test_parity(layers: list[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Row(layers), batch(2, 8, 8)
    assert differences(split(tmp_path, model, (x,), cut="layers.1"), model, (x,), train=True) == []
