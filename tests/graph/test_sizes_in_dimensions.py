"""Sizes that follow from the dimensions of the tensors that a stage has."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy
import torch
from torch import Tensor, nn

from pipegraph.graph.symbolic_size import expression_text, in_dimensions
from tests.codegen.parity import assert_equal_at_every_size, differences, split

a, b = sympy.symbols("a b", integer=True, positive=True)
eighth_a = sympy.Function("FloorDiv")(a, 8)
half_a, half_b = sympy.Function("FloorDiv")(a, 2), sympy.Function("FloorDiv")(b, 2)


@pytest.mark.parametrize(
    ("size", "dimensions", "text"),
    [
        pytest.param(half_a * half_b + half_a + half_b + 1, [half_a + 1, half_b + 1], "p * q", id="product"),
        pytest.param(half_a + 1, [11 * half_a + 11], "(p - 11) // 11 + 1", id="multiple"),
        pytest.param(2 * a, [a], "2 * p", id="symbol"),
        pytest.param(3 * eighth_a + half_a, [half_a], "p + 3 * (p // 4)", id="a quotient of a quotient"),
        pytest.param(sympy.Function("FloorDiv")(a, 3), [half_a], None, id="no multiple of the divisor"),
        pytest.param(a, [half_a], None, id="a quotient does not give its dividend"),
        pytest.param(a * b, [a], None, id="b is in no dimension"),
        pytest.param(half_a, [a + b], None, id="a sum does not give its parts"),
    ],
)
def test_sizes_are_written_with_dimensions(size: sympy.Expr, dimensions: list[sympy.Expr], text: str | None) -> None:
    written = in_dimensions(size, dimensions)
    if written is None:
        assert text is None
        return
    expression, places = written
    assert set(places.values()) <= set(dimensions)
    names = zip(sorted(places, key=lambda symbol: dimensions.index(places[symbol])), "pq", strict=False)
    assert expression_text(expression.xreplace({symbol: sympy.Symbol(name) for symbol, name in names})) == text


class Pixels(nn.Module):
    """Attention over the pixels of an image that convolutions made smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)])

    def forward(self, image: Tensor) -> Tensor:
        x = self.start(image)
        for block in self.blocks:
            height, width = x.shape[2:]
            rows = torch.relu(block(x)).reshape(x.shape[0], 4, height * width)
            x = x + rows.softmax(-1).reshape(x.shape)
        return x.mean((2, 3))


def test_a_stage_does_not_take_the_image_for_its_sizes(tmp_path: Path) -> None:
    model, image = Pixels(), torch.randn(2, 3, 9, 13)
    package = split(tmp_path, model, (image,), cut="blocks.1,blocks.2")
    assert [len(stage.inputs) for stage in package.manifest.stages] == [1, 1, 1]
    assert not differences(package, model, (image,))
    assert_equal_at_every_size(package, model, (4, 3, 11, 8))


class Halved(nn.Module):
    """Each layer halves the length, and a skip connection is added to what is doubled again."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv1d(2, 2, 4, 2, 1) for _ in range(3)])
        self.up = nn.ConvTranspose1d(2, 2, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        half = self.down[0](x)
        quarter = self.down[1](half)
        return half[..., : 4 * (x.shape[2] // 8)] + self.up(self.up(self.down[2](quarter)))


def test_a_stage_takes_quotients_of_the_sizes_of_its_inputs(tmp_path: Path) -> None:
    model, x = Halved(), torch.randn(2, 2, 32)
    package = split(tmp_path, model, (x,), cut="down.2")
    assert not {*package.manifest.stages[1].inputs} & {*package.manifest.args}
    assert differences(package, model, (x,)) == []
    assert_equal_at_every_size(package, model, (3, 2, 41), (5, 2, 27))
