"""Comprehensions stay comprehensions, and ``x[:, 0] += y`` stays one statement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.codegen.layers import batch
from tests.codegen.parity import differences, split

pytestmark = pytest.mark.usefixtures("from_graph")


class Heads(nn.Module):
    """Three heads; what is done with them is for subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.gate = nn.Linear(8, 8)


class Assigned(Heads):
    def forward(self, x: Tensor) -> Tensor:
        outs = [head(x) for head in self.heads]
        return torch.cat(outs, dim=-1)


class Nested(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.tanh(head(x)) for head in self.heads], dim=1).sum(1)


class Generated(Heads):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = torch.cat(tuple(head(y) for head in self.heads), dim=-1)
        return z.sin()


class Numbered(Heads):
    def forward(self, x: Tensor) -> Tensor:
        parts = [head(x) * (i + 2) for i, head in enumerate(self.heads)]
        return torch.stack(parts)


class Chained(Heads):
    """A second comprehension goes over the first, and a line reads both."""

    def forward(self, x: Tensor) -> Tensor:
        outs = [head(x) for head in self.heads]
        gates = [torch.sigmoid(self.gate(out)) for out in outs]
        return torch.stack(outs) * torch.stack(gates)


class Indexed(Heads):
    """One element is read by itself."""

    def forward(self, x: Tensor) -> Tensor:
        outs = [head(x) for head in self.heads]
        return torch.stack(outs).sum(0) + outs[0]


class Appended(Heads):
    """The source has a loop."""

    def forward(self, x: Tensor) -> Tensor:
        outs = []
        for head in self.heads:
            outs.append(head(x))
        return torch.stack(outs)


class Long(Heads):
    def forward(self, x: Tensor) -> Tensor:
        some = [
            F.layer_norm(torch.sigmoid(self.gate(head(x))) * head(x) + torch.tanh(self.gate(x)), (8,)) ** 2
            for head in self.heads
        ]
        return torch.stack(some)


class Added(Heads):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[:, :1] += self.gate(x)[:, :1]
        y[:, 2:] *= 0.5
        return y


class AddedTo(Heads):
    """What it added to is read again."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        part = y[:, :1]
        part += self.gate(x)[:, :1]
        return y * part


CASES: list[tuple[type[Heads], list[str]]] = [
    (Assigned, ["outs = [head(x) for head in self.heads]", "return torch.cat(outs, dim=-1)"]),
    (Nested, ["return torch.stack([head(x).tanh() for head in self.heads], dim=1).sum(1)"]),
    (Generated, ["z = torch.cat([head(y) for head in self.heads], dim=-1)"]),
    (Numbered, ["parts = [head(x) * (i + 2) for i, head in enumerate(self.heads)]"]),
    (Chained, ["outs = [head(x) for head in self.heads]", "gates = [self.gate(out).sigmoid() for out in outs]"]),
    (Indexed, ["outs = [head(x) for head in self.heads]", "outs[0]"]),
    (Appended, ["outs = []", "for head in self.heads:", "outs.append(head(x))"]),
    (Long, ["some = []", "for head in self.heads:", "some.append("]),
    (Added, ["y[:, :1] += self.gate(x)[:, :1]", "y[:, 2:] *= 0.5"]),
    (AddedTo, [".add_(self.gate(x)[:, :1])"]),
]


@pytest.mark.parametrize(("made", "lines"), CASES, ids=[model_class.__name__ for model_class, _ in CASES])
def test_short_forms(made: type[Heads], lines: list[str], tmp_path: Path) -> None:
    model = nn.Sequential(made(), nn.Tanh(), nn.Linear(24 if made in (Assigned, Generated) else 8, 8))
    package = split(tmp_path, model, (batch(),), cut="2")
    text = (package.path / "blocks.py").read_text()
    assert [line for line in lines if line not in text] == []
    assert ("for head in self.heads:" in text) is (made in (Appended, Long))
    assert differences(package, model, (batch(),), train=True) == []


class ByMode(Heads):
    """A list of the same name inside of an if."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            outs = [head(x) * 2 for head in self.heads]
            x = torch.stack(outs).mean(0)
        outs = [self.gate(head(x)) for head in self.heads]
        return torch.stack(outs).sum(0)


@pytest.mark.parametrize("train", [True, False])
def test_short_forms_inside_a_branch(train: bool, tmp_path: Path) -> None:
    model = nn.Sequential(ByMode(), nn.Linear(8, 8)).train(train)
    package = split(tmp_path, model, (batch(),), cut="1")
    assert (package.path / "blocks.py").read_text().count("outs = [self.gate(head(x)) for head in self.heads]") == 1
    assert differences(package, model, (batch(),), train=train) == []
