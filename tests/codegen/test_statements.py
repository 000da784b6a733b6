"""A statement of the model's source is a statement of the generated source, under the same name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.codegen.layers import Block, batch
from tests.codegen.parity import differences, forward_lines, split


class Steps(nn.Module):
    """Calls ``steps`` of a subclass, and then a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Block()
        self.second_projection = Block()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.steps(x))


class Long(Steps):
    """A statement that is too long for one line, and one that is longer than anybody writes."""

    def steps(self, x: Tensor) -> Tensor:
        weighted_values = (
            x.exp().clamp(min=0.25, max=0.7) * 0.5 + x.sin().clamp(min=0.25, max=0.7) - self.first(x).clamp(min=0.25)
        )
        return weighted_values


class TooLong(Steps):
    def steps(self, x: Tensor) -> Tensor:
        normalised = (x.exp().clamp(min=0.25, max=0.7) / x.exp().clamp(min=0.25, max=0.7).sum(-1, keepdim=True)) * (
            self.first(x).clamp(min=0.25) + self.second_projection(x).clamp(min=0.125, max=0.875)
        )
        return normalised


class Renewed(Steps):
    """The same tensor in another shape, under the same name."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(8, device=x.device)
        positions = positions.unsqueeze(0)
        x = self.first(x)
        x = self.second_projection(x)
        x = x * positions
        return self.head(x)


class InTurns(Steps):
    """One statement in a loop."""

    def steps(self, x: Tensor) -> Tensor:
        for module in (self.first, self.second_projection):
            x = x + module(x)
        return x


class Again(Steps):
    """The same modules in every turn."""

    def steps(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.second_projection(self.first(x))
        return x


class Unbound(Steps):
    """What a loop goes over."""

    def forward(self, x: Tensor) -> Tensor:
        total = self.first(x[0])
        for row in x.unbind(0):
            total = total * total.sigmoid() + row
        return self.head(total)


def rotate(x: Tensor, factor: Tensor) -> Tensor:
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.cat([x1 * factor - x2 * factor.cos(), x2 * factor + x1 * factor.cos()], dim=-1)


class InFunctions(Steps):
    """Calls a function that is defined outside the class."""

    def steps(self, x: Tensor) -> Tensor:
        factor = x.mean() + 1
        return rotate(x, factor)


class Overwritten(Steps):
    """What a value was before its name is given again is written before."""

    def steps(self, x: Tensor) -> Tensor:
        values = []
        state = x.sin()
        for _ in range(3):
            values.append(state.exp() * 2)
            state = state * x
        return torch.stack(values).sum(0) + state


STEPS = ["return self.steps(x)", "", "    def steps(self, x: Tensor) -> Tensor:"]
CASES = {
    Long: [
        *STEPS,
        "weighted_values = (",
        "    x.exp().clamp(min=0.25, max=0.7) * 0.5 + x.sin().clamp(min=0.25, max=0.7) - self.first(x).clamp(min=0.25)",
        ")",
        "return weighted_values",
    ],
    TooLong: [
        *STEPS,
        "normalised = (x.exp().clamp(min=0.25, max=0.7) / x.exp().clamp(min=0.25, max=0.7).sum(-1, keepdim=True)) * (",
        "    self.first(x).clamp(min=0.25) + self.second_projection(x).clamp(min=0.125, max=0.875)",
        ")",
        "return normalised",
    ],
    Renewed: [
        "positions = torch.arange(8, device=x.device)",
        "positions = positions.unsqueeze(0)",
        "x = self.first(x)",
        "x = self.second_projection(x)",
        "x = x * positions",
        "return x",
    ],
    InTurns: [*STEPS, "for module in (self.first, self.second_projection):", "    x = x + module(x)", "return x"],
    Again: [*STEPS, "for _ in range(2):", "    x = x + self.second_projection(self.first(x))", "return x"],
    Unbound: [
        "total = self.first(x[0])",
        "for row in x.unbind(0):",
        "    total = total * total.sigmoid() + row",
        "return total",
    ],
    InFunctions: [
        *STEPS,
        "factor = x.mean() + 1",
        "return rotate(x, factor)",
    ],
    Overwritten: [
        *STEPS,
        "values = []",
        "state = x.sin()",
        "for _ in range(3):",
        "    values.append(state.exp() * 2)",
        "    state = state * x",
        "return torch.stack(values).sum(0) + state",
    ],
}


@pytest.mark.parametrize("model", CASES)
def test_statements(model: type[Steps], tmp_path: Path) -> None:
    built = model()
    package = split(tmp_path, built, (batch(),), cut="head")
    assert forward_lines(package) == CASES[model]
    assert differences(package, built, (batch(),)) == []


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., ::2].exp(), x[..., 1::2]


def swapped(x: Tensor) -> Tensor:
    even, odd = halves(x)
    return torch.cat([odd * even.sum() + odd.cos(), even * even.sin()], dim=-1)


class InFunctionsOfFunctions(Steps):
    """Several results of a function that a function calls: which is which is not known."""

    def steps(self, x: Tensor) -> Tensor:
        return swapped(x)


def test_results_of_a_function_that_a_function_calls(tmp_path: Path) -> None:
    model = InFunctionsOfFunctions()
    assert differences(split(tmp_path, model, (batch(),), cut="head"), model, (batch(),)) == []
