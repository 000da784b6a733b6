"""A loop inside a loop of the model stays one: over experts, for each layer."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.codegen.layers import batch
from tests.codegen.parity import differences, split

pytestmark = pytest.mark.usefixtures("from_graph")


class OfEachLayer(nn.Module):
    """Has separate experts for each layer, in a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.routers = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            weights = router(x).softmax(-1)
            total = torch.zeros_like(x)
            for index, expert in enumerate(experts):
                total = total + weights[..., index : index + 1] * expert(x)
            x = x + total
        return x


class Shared(nn.Module):
    """Runs the same experts several times; their number is an attribute, and another one is the number of rounds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rounds, self.count = 3, 4
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            weights = self.gate(x).softmax(-1)
            total = torch.zeros_like(x)
            for e in range(self.count):
                total = total + weights[..., e : e + 1] * self.experts[e](x)
            x = x + total
        return x


class Twice(Shared):
    """Repeats a statement without numbers that grow, which is not written as a loop."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            for _ in range(self.count):
                x = x.sin()
            x = self.gate(x) @ self.gate.weight
        return x


CASES = {
    OfEachLayer: [
        "for router, expert in zip(self.routers, self.experts, strict=True):",
        "    weights = F.softmax(router(x), dim=-1)",
        "    total = torch.zeros_like(x)",
        "    for index in range(4):",
        "        total = total + weights[..., index : index + 1] * expert[index](x)",
        "    x = x + total",
        "return x",
    ],
    Shared: [
        "for _ in range(self.rounds):",
        "    weights = F.softmax(self.gate(x), dim=-1)",
        "    total = torch.zeros_like(x)",
        "    for e in range(self.count):",
        "        total = total + weights[..., e : e + 1] * self.experts[e](x)",
        "    x = x + total",
        "return x",
    ],
    Twice: [
        "for _ in range(self.rounds):",
        "    x = x.sin().sin().sin().sin()",
        "    x = self.gate(x) @ self.gate.weight",
        "return x",
    ],
}


@pytest.mark.parametrize("model", CASES)
def test_a_loop_in_a_loop_stays_one(model: type[nn.Module], tmp_path: Path) -> None:
    built = nn.Sequential(OrderedDict(body=model(), head=nn.Linear(8, 8)))
    package = split(tmp_path, built, (batch(2, 4, 8),), cut="head")
    assert differences(package, built, (batch(2, 4, 8),)) == []
    text = (package.path / "blocks.py").read_text().split(f"class {model.__name__}(")[1]
    body = text.split("def forward(")[1].split(":\n", 1)[1]
    assert [line.removeprefix(" " * 8) for line in body.splitlines()] == CASES[model]
