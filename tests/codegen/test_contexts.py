"""``no_grad`` and ``autocast`` blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.codegen.layers import Block, Blocks, Row, batch
from tests.codegen.parity import differences, forward_lines, split


class Mixed(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            mean = h.mean()
            mean = mean * 2
        with torch.autocast("cpu", enabled=False):
            h = h.float() * mean
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.b(h)
        return y.float().detach() * 0.5 + self.c(h)


class Views(Blocks):
    """A view made under no_grad says that it requires a gradient; blocks inside each other."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            part = h[:, :4]
            double = part * 2
            with torch.enable_grad():
                z = h * 3
        return self.b(h) * torch.cat([part, double], 1) + z


class Teacher(Blocks):
    """Whole modules under no_grad, one of which runs with a gradient later."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.b(self.a(x))
        return self.c(self.a(h))


class Decorated(Blocks):
    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        return self.a(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.encode(x)))


class Returned(Blocks):
    """The last thing that a module and the model do stands in a block."""

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.linear(x)

    def __init__(self) -> None:
        super().__init__()
        self.narrow = self.Narrow()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.narrow(self.b(self.a(x)))
        with torch.no_grad():
            y = self.c(h.float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return h, y, self.last(h)


class Written(Blocks):
    """A value made in one block is written into a buffer in another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = h @ h.T
        with torch.no_grad():
            self.mean.add_(product.sum())
        return self.c(h)


class NoGradInAutocast(Blocks):
    """torch.export keeps no block of no_grad that is inside of one of autocast, nor a block in that."""

    @torch.no_grad()
    def scale(self, x: Tensor) -> Tensor:
        return x.abs().amax(-1, keepdim=True) + 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            y = h / self.scale(h)
            with torch.no_grad():
                mean = h.mean()
                with torch.enable_grad():
                    z = h * 3
            y = y * mean + z
        return self.c(self.b(y))


class Autocast(Row):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__([Block() for _ in range(4)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            x = super().forward(x)
        return self.head(x.float())


CASES = [
    (Mixed, "b"),
    (Mixed, "c"),
    (Views, "b"),
    (Teacher, "b"),
    (Teacher, "c"),
    (Decorated, "b"),
    (Decorated, "c"),
    (Returned, "b"),
    (Returned, "last"),
    (Written, "b"),
    (NoGradInAutocast, "b"),
    (NoGradInAutocast, "c"),
]


@pytest.mark.parametrize(("model", "cut"), [*CASES, (Autocast, "layers.2"), (Autocast, "layers.1,head")])
def test_parity(model: type[nn.Module], cut: str, tmp_path: Path) -> None:
    built = model()
    assert differences(split(tmp_path, built, (batch(),), cut=cut), built, (batch(),), train=True) == []


@pytest.mark.parametrize("model", [Mixed, Views, NoGradInAutocast])
def test_a_capture_without_gradients_keeps_blocks(model: type[nn.Module], tmp_path: Path) -> None:
    built = model()
    with torch.no_grad():
        package = split(tmp_path, built, (batch(),), cut="b")
    assert differences(package, built, (batch(),), train=True) == []


def test_blocks_come_back_as_blocks(tmp_path: Path) -> None:
    assert forward_lines(split(tmp_path, Mixed(), (batch(),), cut="c"), 0) == [
        "h = self.a(x)",
        "with torch.no_grad():",
        "    mean = h.mean()",
        "    mean = mean * 2",
        'with torch.autocast("cpu", enabled=False):',
        "    h = h.float() * mean",
        'with torch.autocast("cpu", dtype=torch.bfloat16):',
        "    y = self.b(h)",
        "return h, y.to(torch.float32).detach() * 0.5",
    ]


class Codebook(Blocks):
    """After a VQ-VAE: moving averages that training writes, and a table that is filled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 8))
        self.register_buffer("sizes", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        indices = torch.cdist(h, self.codes).argmin(1).unsqueeze(1)
        chosen = torch.zeros(indices.shape[0], 5, device=x.device)
        chosen.scatter_(1, indices, 1)
        if self.training:
            with torch.no_grad():
                self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.5)
                total = self.sizes.sum()
                sizes = (self.sizes + 1e-3) / total
                sums = chosen.t() @ h
                self.codes.copy_(sums / sizes.unsqueeze(1))
        return self.b(h + (chosen @ self.codes - h).detach())


def test_what_ran_in_one_block_is_one_block(tmp_path: Path) -> None:
    model = Codebook()
    package = split(tmp_path, model, (batch(),), cut="b")
    assert forward_lines(package)[2:14] == [
        "chosen = torch.zeros(x.shape[0], 5, device=x.device)",
        "chosen = chosen.scatter(1, indices, 1)",
        "if self.training:",
        "    with torch.no_grad():",
        "        self.sizes.mul_(0.9)",
        "        self.sizes.add_(chosen.sum(0), alpha=0.5)",
        "        total = self.sizes.sum()",
        "        sizes = (self.sizes + 0.001) / total",
        "        sums = chosen.t() @ h",
        "        self.codes.copy_(sums / sizes.unsqueeze(1))",
        "return h + (chosen @ self.codes - h).detach()",
    ]
    for train in (True, False):
        assert differences(package, model, (batch(),), train=train) == []
