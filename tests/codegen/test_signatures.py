"""What ``forward`` of a class or a stage takes and returns: in the names and the order of the model's source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.codegen.layers import Block, batch
from tests.codegen.parity import differences, forward_lines, source, split

pytestmark = pytest.mark.usefixtures("from_graph")

INPUTS = (batch(), batch(8))


class Join(nn.Module):
    """Reads its arguments in another order than it takes them, and makes its results in another than it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, skip: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        gate = skip.sigmoid()
        joined = self.linear(x) * gate
        return joined if scale is None else joined * scale, gate


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.ModuleList(Block() for _ in range(3))
        self.middle = nn.Linear(8, 8)
        self.up = nn.ModuleList(Join() for _ in range(3))

    def forward(self, images: Tensor, factor: Tensor) -> Tensor:
        x = images
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
        x = self.middle(x)
        for up in self.up:
            x, gate = up(x, scale=factor, skip=skips.pop())
            x = x + gate
        return x


def test_a_class_takes_and_returns_what_its_module_does(tmp_path: Path) -> None:
    model = Joined()
    package = split(tmp_path, model, INPUTS, cut="up.1")
    assert "def forward(self, x: Tensor, skip: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:" in source(package)
    assert "        return joined * scale, gate\n" in source(package)
    assert "x, gate = self.up[0](x, images, factor)" in forward_lines(package)
    assert differences(package, model, INPUTS) == []


def test_a_stage_calls_what_it_takes_as_its_modules_do(tmp_path: Path) -> None:
    """Boundaries of one name in the model: numbers stand in the manifest, where names are the whole pipeline's."""
    package = split(tmp_path, Joined(), INPUTS, cut="up.1")
    assert package.manifest.stages[1].inputs == ("factor", "x", "x_1", "x_2")
    text = (package.path / "stage_1.py").read_text()
    assert "def forward(self, factor: Tensor, skip: Tensor, skip_1: Tensor, x: Tensor) -> Tensor:" in text
    assert "factor f32[8], skip f32[batch, 8], skip_1 f32[batch, 8], x f32[batch, 8] → x f32[batch, 8]" in text
    assert "x_1" not in text


class Several(nn.Module):
    """One name for the value of every statement."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = h + layer(h)
        return h


def test_a_name_has_no_number_in_a_stage_that_knows_one_of_the_name(tmp_path: Path) -> None:
    model = Several()
    package = split(tmp_path, model, (batch(),), cut="layers.1,layers.2")
    assert package.manifest.stages[2].inputs == ("h_2",)
    assert forward_lines(package, 1) == ['return h + self.layers["1"](h)']
    assert forward_lines(package, 2) == ['h = h + self.layers["2"](h)', 'return h + self.layers["3"](h)']
    assert differences(package, model, (batch(),)) == []


class Repeated(nn.Module):
    """A module called twice, and values that go through calls as parts of tuples and dicts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pair = Pair()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.pair((x, x.exp()), {"mask": x > 0})["both"]
        second = self.pair(first, {"mask": x > 0})["both"]
        return self.head(second[0] + second[1])


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair: tuple[Tensor, Tensor], options: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        query, key = pair
        key = torch.where(options["mask"], key, query)
        return {"both": (self.linear(query), self.linear(key))}


def test_parts_of_arguments_keep_their_own_names(tmp_path: Path) -> None:
    model = Repeated()
    package = split(tmp_path, model, (batch(),), cut="head")
    assert differences(package, model, (batch(),)) == []
    assert source(package).count("class Pair(") == 1


class Cell(nn.Module):
    """Takes its state as a tuple, and returns it as one."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(16, 32)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        i, f, g, o = self.gates(torch.cat([x, h], -1)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return x + c, (o.sigmoid() * c.tanh(), c)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Cell(), Cell()

    def forward(self, x: Tensor) -> Tensor:
        state = x.sin(), x.cos()
        out, state = self.first(x, state)
        out, (hidden, cell) = self.second(out, state)
        return out + hidden + cell


def test_the_parts_of_a_tuple_have_the_names_that_the_source_gives_them(tmp_path: Path) -> None:
    model = nn.Sequential(Cells(), nn.Linear(8, 8))
    package = split(tmp_path, model, (batch(),), cut="1")
    text = source(package)
    assert "def forward(self, x: Tensor, h: Tensor, c: Tensor)" in text
    assert differences(package, model, (batch(),), train=True) == []
