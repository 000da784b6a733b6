"""Around a loop over statements: stages that begin inside it, its last iteration, and what is read after it."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.codegen.layers import batch
from tests.codegen.parity import differences, forward_lines, source, split

pytestmark = pytest.mark.usefixtures("from_graph")


def inside(body: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(8, 8)))


class InThree(nn.Module):
    """Stages begin inside the loop: what the list holds until then crosses between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        outputs = []
        for expert in self.experts:
            outputs.append(expert(x).tanh())
        return self.head(torch.stack(outputs).sum(0))


def test_a_loop_is_cut(tmp_path: Path) -> None:
    model = InThree()
    package = split(tmp_path, model, (batch(2, 8),), cut="experts.4,head")
    assert differences(package, model, (batch(2, 8),)) == []
    assert forward_lines(package) == [
        "x = self.embed(x)",
        "outputs = []",
        "for expert in self.experts:",
        "    outputs.append(expert(x).tanh())",
        "return x, *outputs",
    ]
    assert "-> tuple[Tensor, ...]:" in (package.path / "stage_0.py").read_text()


def test_a_list_is_all_that_a_stage_returns(tmp_path: Path) -> None:
    model = InThree()
    package = split(tmp_path, model, (batch(2, 8),), cut="experts.0,head")
    assert differences(package, model, (batch(2, 8),)) == []
    assert forward_lines(package, stage=1)[-1].startswith("return ")


class OnOneLine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).sin().cos()
        return self.head(x)


def test_a_stage_that_begins_inside_an_iteration_has_whole_ones_after_it(tmp_path: Path) -> None:
    """A loop over what lies between two modules would go beyond the last one."""
    model = OnOneLine()
    package = split(tmp_path, model, (batch(2, 8),), cut="layers.0:end")
    assert differences(package, model, (batch(2, 8),)) == []
    assert forward_lines(package, stage=1) == [
        "x = x + x_1.sin().cos()",
        "for layer in self.layers.values():",
        "    x = x + layer(x).sin().cos()",
        "return self.head(x)",
    ]


class LooksAhead(nn.Module):
    """What the last iteration would compute for a next one is not in the graph, and there is no row for it."""

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = x[:, 0], []
        for t in range(x.shape[1] - 1):
            outputs.append(h.sin())
            h = h * x[:, t + 1]
        return torch.stack(outputs, dim=1).sum(1, keepdim=True) + x


def test_a_last_iteration_does_not_go_beyond_the_end(tmp_path: Path) -> None:
    model = inside(LooksAhead())
    package = split(tmp_path, model, (batch(2, 6, 8),), cut="head")
    assert differences(package, model, (batch(2, 6, 8),)) == []


class SizesAfterwards(nn.Module):
    """After the loops a size is asked for that only values with names of the loops have had."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        i = x.sin().flatten(1)
        h = i[:, :8] + 1
        for t in range(3):
            h = h * i[:, t : t + 1]
        outputs = x.cos().flatten(1)
        total = outputs.sum()
        expert_outputs = []
        for expert in self.experts:
            expert_outputs.append(expert(h))
        return torch.stack(expert_outputs).sum(0).unsqueeze(1) * torch.ones(x.shape[0], 1, 1) + total + x


def test_sizes_are_asked_of_tensors(tmp_path: Path) -> None:
    model = inside(SizesAfterwards())
    package = split(tmp_path, model, (batch(3, 4, 8),), cut="head")
    assert differences(package, model, (batch(3, 4, 8),)) == []


class ChangesTheLast(nn.Module):
    """The variable of the last element has another value when the elements are read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = x[:, 0], []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            outputs.append(h)
        h = self.last(h)
        return torch.stack([*outputs[:-1], h], dim=1) + h.sum()


def test_a_variable_that_has_another_value_is_no_element(tmp_path: Path) -> None:
    model = inside(ChangesTheLast())
    package = split(tmp_path, model, (batch(2, 5, 8),), cut="head")
    assert differences(package, model, (batch(2, 5, 8),)) == []
    assert "return torch.stack([*outputs[:4], h], dim=1) + h.sum()" in (package.path / "blocks.py").read_text()


class WritesBuffers(nn.Module):
    """Each iteration changes buffers, and reads a parameter that the first one begins with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(8)
        self.begin = nn.Parameter(torch.rand(8))
        self.register_buffer("seen", torch.zeros(8))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.begin
        for t in range(x.shape[1]):
            with torch.no_grad():
                scale = h.abs().mean() + 1
            h = self.norm(x[:, t]) * h / scale
            self.seen += h.detach().mean(0)
        return x + h.unsqueeze(1)


def test_iterations_that_write_into_buffers(tmp_path: Path) -> None:
    model = inside(WritesBuffers())
    package = split(tmp_path, model, (batch(3, 5, 8),), cut="head")
    assert "for t in range(" in (package.path / "blocks.py").read_text()
    assert differences(package, model, (batch(3, 5, 8),), train=True) == []


class TakesTheName(nn.Module):
    """What the loop goes over is taken from a value whose name is given to another one before it begins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.GRUCell(8, 8), nn.GRUCell(8, 8)

    def forward(self, h: Tensor) -> Tensor:
        zeros = h.new_zeros(h.shape[0], 8)
        steps = h.unbind(1)
        h, c = zeros, zeros
        outputs = []
        for step in steps:
            h = self.first(step, h)
            c = self.second(h, c)
            outputs.append(c)
        return torch.stack(outputs, dim=1)


def test_a_name_is_given_away_before_the_loop(tmp_path: Path) -> None:
    model = inside(TakesTheName())
    package = split(tmp_path, model, (batch(2, 5, 8),), cut="head")
    assert differences(package, model, (batch(2, 5, 8),)) == []


class TakesPairs(nn.Module):
    """The state of a layer is a pair, of which the last call's second half is not read; two layers run one loop."""

    class Cell(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.gates = nn.Linear(width + 4, 16)

        def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            h, c = state
            i, f, o, g = self.gates(torch.cat([x, h], dim=-1)).chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            return o.sigmoid() * c.tanh(), c

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.ModuleList([self.Cell(8), self.Cell(4)])
        self.out = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            state = (x.new_zeros(x.shape[0], 4), x.new_zeros(x.shape[0], 4))
            outputs = []
            for t in range(x.shape[1]):
                state = cell(x[:, t], state)
                outputs.append(state[0])
            x = torch.stack(outputs, dim=1)
        return self.out(x)


def test_the_last_call_of_a_loop_returns_what_the_others_do(tmp_path: Path) -> None:
    model = inside(TakesPairs())
    package = split(tmp_path, model, (batch(2, 5, 8),), cut="head")
    text = source(package)
    assert text.count("class Cell(") == 1
    assert text.count("for t in range(") == 2
    assert "self.cells[0](x[:, t], state, c)" in text
    assert differences(package, model, (batch(2, 5, 8),)) == []
