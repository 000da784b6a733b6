"""Functions outside the model's classes are written once in a package, and are called as the model calls them."""

from __future__ import annotations

import copy
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


def smooth(x):
    y = x.abs() + 1
    return (y * y).sum(-1, keepdim=True) / y


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


class Shadowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def smooth(self, x: Tensor) -> Tensor:
        smooth = x.tanh()
        return smooth * smooth + smooth.exp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        smoothed = self.smooth(x)
        return smooth(x) * smoothed + smoothed


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return spread(self.linear(x), 2)


def test_functions_stand_once_and_call_each_other(tmp_path: Path) -> None:
    model, x = nn.Sequential(Attention(), Attention(12), Attention()), torch.randn(2, 5, 8)
    package = split(tmp_path, model, (x,), cut="1")
    text = source(package)
    assert text.count("def rotate_half(x: Tensor) -> Tensor:") == 1
    assert "x1 = x[..., : x.shape[-1] // 2]" in text
    assert text.count("def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:") == 1
    assert "q_embed = q * cos + rotate_half(q) * sin" in text
    assert "return k_embed, q_embed" in text
    assert "key, query = rotate(self.q(x), self.k(x), self.angles.cos(), self.angles.sin())" in text
    assert "(test_helper_functions.py:" in text
    assert differences(package, model, (x,)) == []


def test_a_parameter_is_an_argument(tmp_path: Path) -> None:
    model, x = nn.Sequential(Norm(), nn.Linear(8, 8), Norm()), torch.randn(3, 8)
    package = split(tmp_path, model, (x,), cut="1")
    assert "return weighed(x, self.weight)" in source(package)
    assert "def weighed(x: Tensor, weight: Tensor) -> Tensor:" in source(package)
    assert differences(package, model, (x,)) == []


def test_a_function_of_other_numbers_is_written_out(tmp_path: Path) -> None:
    model, x = nn.Sequential(Scaled(0.25), Scaled(0.75), Scaled(0.25)), torch.randn(3, 8)
    package = split(tmp_path, model, (x,), cut="1")
    assert "def scaled" not in source(package)
    assert differences(package, model, (x,)) == []


def test_no_variable_has_the_name_of_a_function_in_use(tmp_path: Path) -> None:
    model, x = nn.Sequential(Shadowed(), Shadowed()), torch.randn(3, 8)
    package = split(tmp_path, model, (x,), cut="1")
    assert "def smooth(x: Tensor) -> Tensor:" in source(package)
    assert differences(package, model, (x,)) == []


def test_a_function_that_follows_the_mode_is_written_out(tmp_path: Path) -> None:
    class Dropped(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return dropped(x * self.weight, self.training)

    model, x = nn.Sequential(Dropped(), nn.Linear(8, 8), Dropped()), torch.randn(3, 8)
    package = split(tmp_path, model, (x,), cut="1")
    assert "def dropped" not in source(package)
    assert differences(package, model, (x,), train=True) == differences(package, model, (x,), train=False) == []


def test_the_size_of_a_parameter_is_not_asked_of_what_took_its_name(tmp_path: Path) -> None:
    """The function that is written inside has a variable of the same name."""

    class Shortened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(shortened(self.first(x)))

    model, x = nn.Sequential(Shortened(), Shortened()), torch.randn(3, 8)
    package = split(tmp_path, model, (x,), cut="1")
    assert differences(package, model, (x,)) == []


def test_a_function_that_calls_itself_is_written_out(tmp_path: Path) -> None:
    model, x = nn.Sequential(Recursive(), Recursive()), torch.randn(3, 8)
    package = split(tmp_path, model, (x,), cut="1")
    assert "def spread" not in source(package)
    assert differences(package, model, (x,)) == []


def test_a_stage_calls_functions_of_its_own(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return smooth(self.second(smooth(self.first(x))))

    model, x = Model(), torch.randn(3, 8)
    package = split(tmp_path, model, (x,), cut="second")
    first, last = (package.path.joinpath(f"stage_{index}.py").read_text() for index in range(2))
    assert "from .blocks import smooth" in first
    assert "return smooth(self.second(" in last
    assert differences(package, model, (x,)) == []


def test_blocks_may_be_functions_alone(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(rotate_half(self.first(x)))

    model, x = Model(), torch.randn(3, 8)
    package = split(tmp_path, model, (x,), cut="second")
    assert "from torch import Tensor\n" in package.path.joinpath("blocks.py").read_text()
    assert differences(package, model, (x,)) == []


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
