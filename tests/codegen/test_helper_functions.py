"""What functions outside the model's classes compute is written at each of their calls."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.codegen.parity import differences, source, split

pytestmark = pytest.mark.usefixtures("from_graph")


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate(q, k, cos, sin):
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return k_embed, q_embed


def scaled(x, scale):
    x = x - x.mean(-1, keepdim=True)
    return x * scale * x.sigmoid()


def weighed(x, weight, eps=1e-3):
    variance = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + eps))


def spread(x, depth):
    if depth == 0:
        return x
    return (spread(x, depth - 1).tanh() + x).exp() / 8


def dropped(x, training):
    y = F.dropout(x, 0.5, training=training) + 1
    return (y * y).sum(-1, keepdim=True) / y.exp()


def halve(x):
    x = x[..., ::2]
    return x * x


def shortened(x):
    y = halve(x)
    z = torch.cat([y, y.sin(), y.cos()], -1)
    return z[..., : x.shape[-1] // 2] + z[..., -(x.shape[-1] // 2) :]


class Attention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, width), nn.Linear(8, width)
        self.out = nn.Linear(width, 8)
        self.register_buffer("angles", torch.linspace(0, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        key, query = rotate(self.q(x), self.k(x), self.angles.cos(), self.angles.sin())
        return x + self.out(query * key.softmax(-1))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return weighed(x, self.weight)


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), scale

    def forward(self, x: Tensor) -> Tensor:
        return scaled(self.linear(x), self.scale)


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return spread(self.linear(x), 2)


class Dropped(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return dropped(x * self.weight, self.training)


class Shortened(nn.Module):
    """The function has a variable of the same name as the one that it is called in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(shortened(self.first(x)))


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "functions that call each other": lambda: [Attention(), Attention(12), Attention()],
    "a parameter as an argument": lambda: [Norm(), nn.Linear(8, 8), Norm()],
    "several numbers": lambda: [Scaled(0.25), Scaled(0.75), Scaled(0.25)],
    "the mode": lambda: [Dropped(), nn.Linear(8, 8), Dropped()],
    "a variable of the same name": lambda: [Shortened(), Shortened()],
    "a function that calls itself": lambda: [Recursive(), Recursive()],
}


@pytest.mark.parametrize("name", MODELS)
def test_functions_are_written_out(name: str, tmp_path: Path) -> None:
    model, x = nn.Sequential(*MODELS[name]()), torch.randn(3, 5, 8)
    package = split(tmp_path, model, (x,), cut="1")
    assert re.findall(r"^def ", source(package), re.MULTILINE) == []
    assert differences(package, model, (x,), train=True) == differences(package, model, (x,), train=False) == []


def mask(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    places = torch.arange(length, device=device)
    least = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)
    return torch.where(places > places.view(length, 1), least, torch.zeros((), dtype=dtype, device=device))


class Distances(nn.Module):
    """Takes no tensors, and has none."""

    def forward(self, length: int, device: torch.device) -> Tensor:
        places = torch.arange(length, device=device)
        return (places - places.view(length, 1)).abs().sqrt()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scores, self.distances = nn.Linear(8, 8), nn.Linear(8, 8), Distances()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        scores = self.scores(x) @ x.mT + mask(16, x.dtype, x.device)[: x.shape[1], : x.shape[1]]
        return (scores - self.distances(16, x.device)[: x.shape[1], : x.shape[1]].to(x.dtype)).softmax(-1) @ x


def test_what_has_no_tensor_makes_none_on_a_device_of_its_own(tmp_path: Path) -> None:
    """The code of a module without tensors is written in a module that has a tensor with its device and dtype."""
    model, x = Masked(), torch.randn(2, 5, 8)
    package = split(tmp_path, model, (x,), cut="scores")
    assert "get_default_device" not in source(package) and "float32" not in source(package)
    assert differences(package, model, (x,)) == []
    stages, half = [package.load_stage(index).to(torch.bfloat16) for index in range(2)], x.to(torch.bfloat16)
    assert torch.equal(stages[1](stages[0](half)), copy.deepcopy(model).to(torch.bfloat16)(half))
