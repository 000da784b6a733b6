"""Calls of equal layers in a row become loops, where a loop computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.codegen.layers import Block, Row, batch
from tests.codegen.parity import differences, forward_lines, split

pytestmark = pytest.mark.usefixtures("from_graph")


class Three(nn.Module):
    """Takes the running value, a second and a third."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * y + z


class Pair(nn.Module):
    """Hands on two values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(b), a + b


class Invariant(Row):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = x.exp()
        for layer in self.layers:
            x = layer(x, first, mask)
        return x * first


class KeepsItsInput(Row):
    """The first value goes round the loop and into every turn; the first takes it once, and has another class."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = layer(h, x, mask)
        return h + x


class TwiceTheSame(Row):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x, mask)
        return x


class OtherStart(Row):
    """The first call differs from the others."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.layers[0](x, mask, mask)
        for layer in self.layers[1:]:
            y = layer(mask, y, x)
        return y


class TwoCarried(Row):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = x, y
        for layer in self.layers:
            a, b = layer(a, b)
        return a - 2 * b


class SwappedCarried(Row):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = x, y
        for layer in self.layers:
            b, a = layer(a, b)
        return a - 2 * b


class SkipOut(Row):
    """One value inside the row is read after it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        skip = x
        for index, layer in enumerate(self.layers):
            x = layer(x)
            skip = x if index == 1 else skip
        return torch.cat([skip, x, y], -1)


class AllOut(Row):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return torch.stack(states).sum(0) + y


class Backwards(Row):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x + y


class EveryOther(Row):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers[::2]:
            x = layer(x)
        return self.layers[1](x) + y


class Between(Row):
    """Something happens between two layers."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                x = x + y
        return x


def rows(model: type[Row], layer: type[nn.Module]) -> Row:
    torch.manual_seed(0)
    return model([layer() for _ in range(4)])


# (the model, its layer, the lines of a stage that holds all but the last layer)
CASES = [
    (
        Invariant,
        Three,
        ["first = x.exp()", "for layer in self.layers:", "    x = layer(x, first, mask)", "return first, x"],
    ),
    (
        KeepsItsInput,
        Three,
        [
            "h = self.layers[0](x, mask)",
            "for layer in self.layers[1:]:",
            "    h = layer(h, x, mask)",
            "return h",
        ],
    ),
    (TwiceTheSame, Three, ["for layer in self.layers:", "    x = layer(x, mask)", "return x"]),
    (TwoCarried, Pair, ["for layer in self.layers:", "    x, y = layer(x, y)", "return x, y"]),
    (SwappedCarried, Pair, ["for layer in self.layers:", "    y, x = layer(x, y)", "return y, x"]),
    (Backwards, Block, ['x = self.layers["3"](x)', 'x = self.layers["2"](x)', 'return self.layers["1"](x)']),
    (SkipOut, Block, None),
    (AllOut, Block, None),
    (OtherStart, Three, None),
    (EveryOther, Block, None),
    (Between, Block, None),
]


@pytest.mark.parametrize(("model", "layer", "lines"), CASES)
def test_loop(model: type[Row], layer: type[nn.Module], lines: list[str] | None, tmp_path: Path) -> None:
    built, inputs = rows(model, layer), (batch(), batch(3, 8) + 1)
    last = {"Backwards": "layers.0", "EveryOther": "layers.1"}.get(model.__name__, "layers.3")
    package = split(tmp_path, built, inputs, cut=last)
    assert differences(package, built, inputs) == []
    if lines is not None:
        assert forward_lines(package) == lines


def test_a_value_that_leaves_the_row_keeps_it_from_rolling_there(tmp_path: Path) -> None:
    package = split(tmp_path, rows(SkipOut, Block), (batch(), batch()), cut="layers.3")
    assert forward_lines(package) == [
        "for layer in self.layers[:2]:",
        "    x = layer(x)",
        "x_1 = self.layers[2](x)",
        "return x, x_1",
    ]


def test_values_that_all_leave_are_not_rolled(tmp_path: Path) -> None:
    package = split(tmp_path, rows(AllOut, Block), (batch(), batch()), cut="layers.2")
    assert not any(line.startswith("for ") for line in forward_lines(package))


@pytest.mark.parametrize("model", [Invariant, KeepsItsInput, TwiceTheSame])
def test_a_row_in_the_middle_stage(model: type[Row], tmp_path: Path) -> None:
    built = rows(model, Three)
    package = split(tmp_path, built, (batch(), batch()), cut="layers.1,layers.3")
    assert sum(line.startswith("for ") for line in forward_lines(package, 1)) == 1
    assert differences(package, built, (batch(), batch())) == []


@pytest.mark.parametrize(
    ("names", "loops"),
    [
        (["0", "1", "2"], 1),
        (["5", "6", "7"], 1),
        (["2", "1", "0"], 0),
        (["0", "1", "one"], 1),
        (["01", "02", "03"], 0),  # str(i) is not one of these names
        (["\u0660", "\u0661", "\u0662"], 0),
        (["a", "b", "c"], 0),
    ],
)
def test_only_numbers_are_counted(names: list[str], loops: int, tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({name: Block() for name in names})
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers.values():
                x = layer(x)
            return self.head(x)

    model = Named()
    package = split(tmp_path, model, (batch(),), cut="head")
    assert sum(line.startswith("for ") for line in forward_lines(package)) == loops
    assert differences(package, model, (batch(),)) == []
