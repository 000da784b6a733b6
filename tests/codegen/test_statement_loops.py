"""Loops of the model over time steps, experts and pieces stay loops."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.codegen.layers import batch
from tests.codegen.parity import differences, split
from tests.slow import cases

pytestmark = pytest.mark.usefixtures("from_graph")


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.cell: nn.Module = nn.GRUCell(8, 8)
        self.cells = nn.ModuleList(nn.LSTMCell(8, 8) for _ in range(2))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))
        self.named = nn.ModuleDict({str(number): nn.Linear(8, 8) for number in range(3)})
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(8)) for _ in range(3))
        self.gate = nn.Linear(8, 4)
        self.repeats = 3


class Recurrent(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 8)
        outputs = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            outputs.append(h)
        return torch.stack(outputs, dim=1)


class Backwards(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = x[:, 0]
        outputs = []
        for t in reversed(range(x.size(1))):
            h = self.cell(x[:, t], h)
            outputs.append(h)
        return torch.stack(outputs[::-1], dim=1) + h.unsqueeze(1)


class Stacked(Parts):
    """The last states of the cells are not read by anything: they are missing from the graph."""

    def forward(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(x.shape[0], 8)
        states = [(zeros, zeros) for _ in self.cells]
        outputs = []
        for step in x.unbind(1):
            for number, cell in enumerate(self.cells):
                states[number] = cell(step, states[number])
                step = states[number][0]
            outputs.append(step)
        return torch.stack(outputs, dim=1)


class Written(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 8)
        outputs = torch.zeros_like(x)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            outputs[:, t] = h
        return outputs


class Scan(Parts):
    def forward(self, x: Tensor) -> Tensor:
        decay, added = x.sigmoid(), self.first(x)
        state = torch.zeros_like(x[:, 0])
        outputs = []
        for i in range(x.shape[1]):
            state = decay[:, i] * state + added[:, i]
            outputs.append((state * x[:, i]).tanh())
        return torch.stack(outputs, dim=1)


class Experts(Parts):
    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        total = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            total = total + weights[..., i : i + 1] * expert(x)
        return total


class Sum(Parts):
    """The first iteration has nothing to add to."""

    def forward(self, x: Tensor) -> Tensor:
        return sum(expert(x) * 2 for expert in self.experts)  # type: ignore[no-any-return]


class Rows(Parts):
    """Writes longer rows in each iteration, as the gated delta rule does."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.tril(x @ x.transpose(1, 2), -1)
        for i in range(1, 4):
            row = weights[..., i, :i].clone()
            block = weights[..., :i, :i].clone()
            weights[..., i, :i] = row + (row.unsqueeze(-1) * block).sum(-2)
        return weights @ x


class Collected(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts]).amax(0)


class Listed(Parts):
    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for module in self.named.values():
            found.append(module(x).tanh())
        return torch.cat(found, dim=-1)[..., :8] + found[2]


class Pieces(Parts):
    def forward(self, x: Tensor) -> Tensor:
        made = []
        for piece in x.chunk(4, dim=-1):
            made.append(piece.softmax(-1))
        return torch.cat(made, dim=-1)


class Pairs(Parts):
    def forward(self, x: Tensor) -> Tensor:
        made = []
        for piece, expert in zip((x * x).unbind(1), self.experts, strict=False):
            made.append(expert(piece) + piece)
        return torch.stack(made, dim=1)


class Again(Parts):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.repeats):
            x = x + self.first(x).tanh()
        return x


class Scaled(Parts):
    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = (x * scale).sin()
        return x


class Strided(Parts):
    def forward(self, x: Tensor) -> Tensor:
        total = x[..., :2]
        for i in range(4):
            total = total + x[..., 2 * i : 2 * i + 2].exp()
        return total.repeat(1, 1, 4)


class ReadAfterwards(Parts):
    """A value of the last iteration has the name of one that is handed on; pieces are read after the loop."""

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.unbind(1)
        h = x[:, 0]
        for piece in pieces:
            c = h * piece
            h = c.tanh() + piece
        return (c + h + pieces[1]).unsqueeze(1) + x


def scan(decay: Tensor, added: Tensor) -> Tensor:
    state = torch.zeros_like(added[:, 0])
    states = []
    for step in range(added.shape[1]):
        state = decay[:, step] * state + added[:, step]
        states.append(state)
    return torch.stack(states, dim=1)


class Function(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return scan(x.sigmoid(), x) + scan(x, x.cos())


class TwoValues(Parts):
    """Each of two values becomes what the other was."""

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.sin(), x.cos()
        for _ in range(3):
            h, c = c * 2, h + 1
        return h - c


CASES: dict[type[Parts], list[str]] = {
    Recurrent: [
        "h = x.new_zeros(x.shape[0], 8)",
        "outputs = []",
        "for t in range(x.shape[1]):",
        "    h = self.cell(x[:, t], h)",
        "    outputs.append(h)",
        "return torch.stack(outputs, dim=1)",
    ],
    Backwards: [
        "h = x[:, 0]",
        "outputs = []",
        "for t in reversed(range(x.shape[1])):",
        "    h = self.cell(x[:, t], h)",
        "    outputs.append(h)",
        "return torch.stack(outputs[::-1], dim=1) + h.unsqueeze(1)",
    ],
    Stacked: [
        "zeros = x.new_zeros(x.shape[0], 8)",
        "ret = zeros",
        "ret_1 = zeros",
        "ret_2 = zeros",
        "ret_3 = zeros",
        "outputs = []",
        "for step in x.unbind(dim=1):",
        "    ret, ret_1 = self.cells[0](step, (ret, ret_1))",
        "    ret_2, ret_3 = self.cells[1](ret, (ret_2, ret_3))",
        "    outputs.append(ret_2)",
        "return torch.stack(outputs, dim=1)",
    ],
    Written: [
        "h = x.new_zeros(x.shape[0], 8)",
        "outputs = torch.zeros_like(x)",
        "for t in range(x.shape[1]):",
        "    h = self.cell(x[:, t], h)",
        "    outputs[:, t] = h",
        "return outputs",
    ],
    Scan: [
        "decay = x.sigmoid()",
        "added = self.first(x)",
        "state = torch.zeros_like(x[:, 0])",
        "outputs = []",
        "for i in range(x.shape[1]):",
        "    state = decay[:, i] * state + added[:, i]",
        "    outputs.append((state * x[:, i]).tanh())",
        "return torch.stack(outputs, dim=1)",
    ],
    Experts: [
        "weights = F.softmax(self.gate(x), dim=-1)",
        "total = torch.zeros_like(x)",
        "for i, expert in enumerate(self.experts):",
        "    total = total + weights[..., i : i + 1] * expert(x)",
        "return total",
    ],
    Sum: [
        "add = self.experts[0](x) * 2",
        "for expert in self.experts[1:]:",
        "    add = add + expert(x) * 2",
        "return add",
    ],
    Rows: [
        "weights = (x @ x.transpose(1, 2)).tril(diagonal=-1)",
        "for i in range(1, 4):",
        "    row = weights[:, i, :i].clone()",
        "    block = weights[:, :i, :i].clone()",
        "    weights[:, i, :i] = row + (row.unsqueeze(-1) * block).sum(-2)",
        "return weights @ x",
    ],
    Collected: [
        "results = []",
        "for expert in self.experts:",
        "    results.append(expert(x))",
        "return torch.stack(results).amax(dim=[0])",
    ],
    Listed: [
        "found = []",
        "for module in self.named.values():",
        "    found.append(module(x).tanh())",
        "return torch.cat([x, *found], dim=-1)[..., :8] + found[1]",
    ],
    Pieces: [
        "made = []",
        "for piece in x.chunk(4, dim=-1):",
        "    made.append(F.softmax(piece, dim=-1))",
        "return torch.cat(made, dim=-1)",
    ],
    Pairs: [
        "inputs = (x * x).unbind(dim=1)",
        "made = []",
        "for expert, input in zip(self.experts, inputs, strict=True):",
        "    made.append(expert(input) + input)",
        "return torch.stack(made, dim=1)",
    ],
    Again: [
        "for _ in range(self.repeats):",
        "    x = x + self.first(x).tanh()",
        "return x",
    ],
    Scaled: [
        "for scale in self.scales:",
        "    x = (x * scale).sin()",
        "return x",
    ],
    Strided: [
        "total = x[..., :2]",
        "for i in range(4):",
        "    total = total + x[..., i * 2 : (i + 1) * 2].exp()",
        "return total.repeat(1, 1, 4)",
    ],
    ReadAfterwards: [
        "pieces = x.unbind(dim=1)",
        "h = x[:, 0]",
        "for piece in pieces:",
        "    c = h * piece",
        "    h = c.tanh() + piece",
        "return (c + h + pieces[1]).unsqueeze(1) + x",
    ],
    Function: [
        "sigmoid = x.sigmoid()",
        "state = torch.zeros_like(x[:, 0])",
        "states = []",
        "for step in range(sigmoid.shape[1]):",
        "    state = sigmoid[:, step] * state + x[:, step]",
        "    states.append(state)",
        "cos = x.cos()",
        "stack = torch.stack(states, dim=1)",
        "state = torch.zeros_like(cos[:, 0])",
        "states_1 = []",
        "for step in range(x.shape[1]):",
        "    state = x[:, step] * state + cos[:, step]",
        "    states_1.append(state)",
        "return stack + torch.stack(states_1, dim=1)",
    ],
    TwoValues: [
        "h = x.sin()",
        "c = x.cos()",
        "for _ in range(3):",
        "    h_1 = c * 2",
        "    c = h + 1",
        "    h = h_1",
        "return h - c",
    ],
}


SLOW = (Collected, Function, Listed, Pieces, Strided, Sum, Written)


@pytest.mark.parametrize("model", cases(list(CASES), slow=SLOW))
def test_a_loop_stays_a_loop(model: type[Parts], tmp_path: Path) -> None:
    built = nn.Sequential(OrderedDict(body=model(), head=nn.Linear(8, 8)))
    package = split(tmp_path, built, (batch(2, 4, 8),), cut="head")
    assert differences(package, built, (batch(2, 4, 8),)) == []
    text = (package.path / "blocks.py").read_text().split(f"class {model.__name__}(")[1]
    body = text.split("def forward(")[1].split(":\n", 1)[1].split("\n\n\n")[0]
    assert [line.removeprefix(" " * 8) for line in body.splitlines()] == CASES[model]
