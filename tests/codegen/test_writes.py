"""Writes in place: made functional where nothing can see it, kept where something can, and never parted by a cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipegraph.errors import PlanError
from tests.codegen.layers import batch
from tests.codegen.parity import differences, forward_lines, plan_of, split


class Blocks(nn.Module):
    """Linear layers, whose backward does not look at their results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 8)


class Simple(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h += x
        h = h.mul_(2)
        return self.b(h).clamp_(min=0)


class Parts(Blocks):
    """Into views of values, which no rewriting could follow."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        h[:, 0] = 5
        h[:, 1:3].add_(1)
        y = self.c(h)
        z = torch.zeros_like(y)
        z[:, 1] = y[:, 1]
        z[z > 0] = 2.0
        z[:, 2] = h[:, 2]
        z.index_add_(1, torch.tensor([0, 1]), y[:, :2])
        return z


class Order(Blocks):
    """Values read before and after a write into what they were made from."""

    def forward(self, x: Tensor) -> Tensor:
        v = self.a(x).clone()
        doubled = v * 2
        row = v[0]
        v[0] = 0
        flat = v.view(-1)
        total = flat.sum()
        flat[3] = 4.0
        return self.b(v) * total + doubled + v + row


class AcrossTheCut(Blocks):
    """A view is made before the cut and written to after it: rewritten, as no other tensor reads the memory."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(h)
        return self.c(y.add_(h)) + h


class Inputs(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0
        x += 1
        return self.b(self.a(x)) + x


class Statistics(Blocks):
    """Keeps a running mean and a counter, as a user's own module does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.count += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.b(h * self.mean + self.count)


class ReadLater(Blocks):
    """Updated in the first stage, read in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.b(self.a(x)) * self.count


class AssignedBelow(Blocks):
    """A submodule assigns the buffers."""

    class Mean(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(8))
            self.register_buffer("steps", torch.tensor(0))
            self.register_buffer("last", torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.steps += 1
            self.last = self.mean.sum()
            return x * self.mean + self.steps

    def __init__(self) -> None:
        super().__init__()
        self.statistics = self.Mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.statistics(self.a(x))))


class Assigned(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.mean = self.mean * 0.9 + h.detach().mean(0) * 0.1
        return self.b(h)


class Copies(Blocks):
    """Into what no expression names twice: copies, casts, random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        columns = (h * 2)[:, 1:]
        columns += 1
        columns.clamp_(max=2)
        cast = h.softmax(-1, dtype=torch.float64).to(torch.float32)
        cast += h.double().float().mul_(2)
        turned = h.t().contiguous()
        turned[0] += cast[:, 0]
        noise = torch.zeros(8).bernoulli_(0.3)
        return self.b(cast + noise) + columns.sum() + turned.sum(0)[:, None]


class Indexed(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        at = torch.tensor([2, 0])
        h[:, at] = x[:, :2]
        h[0, at] += 1
        h[at, at] = 2.0
        return self.c(h)


class Empty(Blocks):
    """Tensors that get their gradients with what is written into them, and some that get none."""

    def forward(self, x: Tensor) -> Tensor:
        padded = torch.zeros(3, 9)
        row = padded[0]
        h = self.a(x)
        padded[:, 1:] = h
        ones, zeros = torch.ones_like(h), h.new_zeros(3, 1)
        return self.b(h + ones) * padded[:, :8] + row[:8] + ones + zeros


class CopyBeforeWrite(Blocks):
    """A copy that changes nothing but keeps what was there before a write, and a value without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 2
        h[:, 0] += x.sum() * h[:, 1]
        mean, previous_count = h.detach().mean(), self.count * 1
        self.count += 1
        return self.b(h) * mean + previous_count


class Copied(Blocks):
    """The top module of the model writes a buffer with its own ``copy_``, and reads it after that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.mean.copy_(self.mean * 0.9 + h.detach().mean(0))
        return self.c(self.b(h * self.mean))


@pytest.mark.parametrize(
    "model",
    [
        CopyBeforeWrite,
        Copies,
        Indexed,
        Empty,
        Copied,
        Simple,
        Parts,
        Order,
        AcrossTheCut,
        Inputs,
        Statistics,
        Assigned,
        AssignedBelow,
        ReadLater,
    ],
)
def test_parity(model: type[nn.Module], tmp_path: Path) -> None:
    built = model()
    assert differences(split(tmp_path, built, (batch(),), cut="b"), built, (batch(),), train=True) == []


def test_a_sum_in_place_is_written_once(tmp_path: Path) -> None:
    lines = forward_lines(split(tmp_path, Copies(), (batch(),), cut="b"))
    assert "turned[0].add_(cast[:, 0])" in lines
    assert not any(line.startswith("turned[0] =") for line in lines)


def test_what_nothing_else_sees_is_made_functional(tmp_path: Path) -> None:
    package = split(tmp_path, Simple(), (batch(),), cut="b")
    assert forward_lines(package, 0) == ["h = self.a(x)", "h = h + x", "return h * 2"]
    assert forward_lines(package, 1) == ["return self.b(h).clamp_(min=0)"]  # the author's text


def test_a_stage_does_not_change_what_it_was_given(tmp_path: Path) -> None:
    package = split(tmp_path, AcrossTheCut(), (batch(),), cut="b")
    stage, h = package.load_stage(1), batch()
    stage(h)
    assert torch.equal(h, batch())


class Parted(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        view = h[:, :4]
        y = self.b(h)
        h.add_(1)
        return y + h + view.sum()


class PartedBuffer(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x) * self.count)
        self.count.add_(1)
        return h


@pytest.mark.parametrize(
    ("model", "line", "remedy"),
    [
        (Parted, "h.add_(1)", "Try: move the split point to before the tensor is made"),
        (PartedBuffer, "self.count.add_(1)", "Try: move the split point, so that all that uses the buffer lies in one"),
    ],
)
def test_a_cut_between_a_write_and_its_tensor_is_refused(model: type[nn.Module], line: str, remedy: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(model(), (batch(),), cut="b")
    message = str(caught.value)
    assert "writes in place" in message
    assert f"test_writes.py:{_line(line)}: {line}" in message
    assert remedy in message


def _line(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return max(number for number, line in enumerate(lines, 1) if line.strip() == text)


class WritesAnotherDtype(Blocks):
    """A write keeps the dtype of the tensor it writes into; the functional form would promote it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).to(torch.bfloat16)
        h.add_(x.square())
        return self.b(h.float())


def test_a_write_that_converts_stays_a_write(tmp_path: Path) -> None:
    built = WritesAnotherDtype()
    package = split(tmp_path, built, (batch(),), cut="b")
    assert ".add_(" in (package.path / "stage_0.py").read_text()
    assert differences(package, built, (batch(),), train=True) == []
