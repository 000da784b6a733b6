"""Methods that only pass their arguments on to another method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipegraph.codegen.classes.direct_calls import with_direct_calls
from pipegraph.codegen.syntax.statements import ClassSource, SourceText
from tests.codegen.parity import assert_equal_at_every_size, differences, source, split

FORWARD = "def forward(self, x):\n    x = self.first(x)\n    return self.first(x, 2)"
TARGET = "def second(self, x, scale=1):\n    return x * scale"


def methods(*functions: str, users: Sequence[ClassSource] = ()) -> tuple[str, ...]:
    places = tuple(("model.py", number) for number in range(1, sum(text.count("\n") + 1 for text in functions) + 1))
    block = ClassSource("Block", "", forward=(SourceText(functions, places=places),))
    changed = with_direct_calls([block, *users])[0].author_text
    assert changed is not None
    assert len(changed.places) == sum(text.count("\n") + 1 for text in changed.functions)
    return changed.functions


def test_a_method_in_between_is_left_out() -> None:
    first = 'def first(self, x, scale=1):\n    """Scale."""\n    return self.second(x, scale)'
    direct = FORWARD.replace("first", "second")
    assert methods(FORWARD, first, TARGET) == (direct, TARGET)
    assert methods(FORWARD, TARGET, first) == (direct, TARGET)


@pytest.mark.parametrize(
    "first",
    [
        "def first(self, x, scale=2):\n    return self.second(x, scale)",
        "def first(self, x, scale=1):\n    return self.second(x + 1, scale)",
        "def first(self, scale=1, x=None):\n    return self.second(x, scale)",
        "def first(self, x, scale=1):\n    return self.second(x, scale=scale)",
        "def first(self, x, scale=1):\n    x = x.float()\n    return self.second(x, scale)",
        "@torch.no_grad()\ndef first(self, x, scale=1):\n    return self.second(x, scale)",
        "def first(self, x, scale=1):\n    return self.absent(x, scale)",
    ],
)
def test_a_method_that_does_something_stays(first: str) -> None:
    assert methods(FORWARD, first, TARGET) == (FORWARD, first, TARGET)


def test_a_method_that_another_class_calls_stays() -> None:
    first = "def first(self, x, scale=1):\n    return self.second(x, scale)"
    call = SourceText(("def forward(self, x):\n    return self.block.first(x)",))
    assert methods(FORWARD, first, TARGET, users=[ClassSource("User", "", forward=(call,))]) == (FORWARD, first, TARGET)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.projection(x)

    def projection(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return self.scaled_projection(x, scale)

    def scaled_projection(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return scale * self.linear(x)


def test_a_package_calls_the_method_itself(tmp_path: Path) -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(4, 8)
    package = split(tmp_path, model, (x,))
    text = source(package)
    assert "return x + self.scaled_projection(x)" in text
    assert "def projection(" not in text
    assert not differences(package, model, (x,))
    assert_equal_at_every_size(package, model, (2, 8))
