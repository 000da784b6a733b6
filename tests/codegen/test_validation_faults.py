"""Faults that are planted in written packages: translation validation finds each of them."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipegraph
from pipegraph.codegen.package_files import generate
from pipegraph.codegen.proof import differences_of_text
from pipegraph.planner.plan import Plan

pytestmark = pytest.mark.usefixtures("from_graph")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.scale = heads, 0.3
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.key(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v = self.value(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * self.scale
        scores = scores.masked_fill(mask, -1e4)
        weights = self.dropout(scores.float().softmax(-1).to(x.dtype))
        return self.output((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width, eps=1e-3)
        self.attention = Attention(width, 2)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    mean: Tensor
    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.proj = nn.Linear(width, width), nn.Linear(width, 5)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("table", torch.randn(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
            x = x - x.mean((0, 1))
        else:
            x = x - self.mean
        gated = torch.sigmoid(self.gate(x)) * self.table + x.detach()
        first, second = gated.chunk(2, -1)
        y = torch.cat([second, first], -1)
        y[:, 0] = 0.5
        noise = torch.rand_like(y) if self.training else torch.zeros_like(y)
        return self.proj((y + noise).roll(1, 1) - y.cumsum(1) / 7).clamp(-3, 3)


class Model(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width, padding_idx=0)
        self.position = nn.Parameter(torch.randn(16, width))
        self.layers = nn.ModuleList(Block(width) for _ in range(4))
        self.exit = nn.Linear(width, 3)
        self.head = Head(width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, tokens: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        length = tokens.shape[1]
        x = self.embed(tokens) * math.sqrt(8) + self.position[:length]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1) | (bias > 0)
        early = self.exit(x)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return early, self.head(x)


@cache
def package() -> tuple[Plan, dict[str, str]]:
    torch.manual_seed(0)
    inputs = torch.randint(1, 20, (3, 6)), torch.randn(6, 6)
    plan = pipegraph.plan(pipegraph.capture(Model(), inputs, batch_dims={"bias": None}), points=["layers.2"])
    return plan, generate(plan).files


BLOCKS, FIRST, LAST = "blocks.py", "stage_0.py", "stage_1.py"
EARLY = "        early = self.exit(x)\n"
LOOP = "        for layer in self.layers:\n            x = layer(x, mask)\n"

FAULTS: dict[str, tuple[str, str, str]] = {
    "a line is moved behind the loop that overwrites its variable": (FIRST, EARLY + LOOP, LOOP + EARLY),
    "a loop ends one iteration early": (FIRST, "in self.layers:", "in self.layers[:1]:"),
    "a loop begins one iteration late": (FIRST, "in self.layers:", "in self.layers[1:]:"),
    "a loop runs in the other order": (FIRST, "in self.layers:", "in reversed(self.layers):"),
    "an iteration runs twice": (FIRST, "x = layer(x, mask)", "x = layer(layer(x, mask), mask)"),
    "a loop passes on what it began with": (FIRST, "x = layer(x, mask)", "y = layer(x, mask)"),
    "one block stands for all": (FIRST, "[Block() for _ in range(2)]", "[Block()] * 2"),
    "results are swapped": (FIRST, "return mask, early, x", "return mask, x, early"),
    "a result is missing": (FIRST, "return mask, early, x", "return mask, early"),
    "a value is an earlier one": (FIRST, "early = self.exit(x)", "early = self.exit(self.embed(tokens) + 0)"),
    "a number has another digit": (FIRST, "2.8284271247461903", "2.8284261247461903"),
    "a slice is one longer": (FIRST, ": tokens.shape[1]]", ": tokens.shape[1] + 1][1:]"),
    "a size is that of the example": (FIRST, ": tokens.shape[1]]", ": 6]"),
    "a size is of another dimension": (FIRST, "ones(tokens.shape[1], ", "ones(2 * tokens.shape[0], "),
    "a diagonal is another one": (FIRST, "diagonal=1", "diagonal=0"),
    "or is and": (FIRST, "mask | (bias", "mask & (bias"),
    "greater is greater or equal": (FIRST, "bias > 0", "bias >= 0"),
    "a parameter has another shape": (FIRST, "torch.empty(16, 8)", "torch.empty(8, 8)"),
    "a parameter is a buffer": (
        FIRST,
        "self.position = nn.Parameter(torch.empty(16, 8))",
        'self.register_buffer("position", torch.empty(16, 8))',
    ),
    "a parameter is frozen": (FIRST, "torch.empty(16, 8))", "torch.empty(16, 8), requires_grad=False)"),
    "a bias is left out": (FIRST, "nn.Linear(8, 3)", "nn.Linear(8, 3, bias=False)"),
    "a bias is added": (BLOCKS, "nn.Linear(24, 8, bias=False)", "nn.Linear(24, 8)"),
    "padding is not that of the embedding": (FIRST, ", padding_idx=0", ""),
    "arguments are swapped": (BLOCKS, "(weights @ v)", "(v.transpose(-2, -1) @ weights).transpose(-2, -1)"),
    "a module is another one of its class": (BLOCKS, "k = self.key(x)", "k = self.query(x)"),
    "a module is shared": (BLOCKS, "self.key = nn.Linear(8, 8)", "self.key = self.query"),
    "a constant is another one": (BLOCKS, "self.scale = 0.3", "self.scale = 0.31"),
    "an epsilon is the default": (BLOCKS, ", eps=0.001", ""),
    "a cast is lost": (BLOCKS, "F.softmax(scores.to(torch.float32), dim=-1)", "F.softmax(scores, dim=-1)"),
    "a cast back is lost": (BLOCKS, "dim=-1).to(scores.dtype)", "dim=-1)"),
    "a cast is to the dtype of the example": (BLOCKS, ".to(scores.dtype)", ".to(torch.float32)"),
    "a dimension is another one": (BLOCKS, "dim=-1).to(", "dim=-2).to("),
    "a probability is another one": (BLOCKS, "nn.Dropout(p=0.1)", "nn.Dropout(p=0.2)"),
    "a dropout is left out": (BLOCKS, "self.dropout(F.softmax", "(F.softmax"),
    "a transpose is left out": (
        BLOCKS,
        ".unflatten(-1, (self.heads, -1)).transpose(1, 2)\n        scores",
        ".unflatten(-1, (self.heads, -1)).reshape(x.shape[0], 2, -1, 4)\n        scores",
    ),
    "a branch of the mode is the wrong one": (BLOCKS, "if self.training:", "if not self.training:"),
    "a branch of the mode runs always": (BLOCKS, "if self.training:", "if True:"),
    "a gradient is not kept away": (BLOCKS, "x.detach()", "x"),
    "a gradient is kept away": (BLOCKS, "self.gate(x)", "self.gate(x.detach())"),
    "parts are swapped": (BLOCKS, "[second, first]", "[first, second]"),
    "a write is left out": (BLOCKS, "        y[:, 0] = 0.5\n", ""),
    "a write has another place": (BLOCKS, "y[:, 0] = 0.5", "y[:, 1] = 0.5"),
    "an update of a buffer is left out": (BLOCKS, "                self.mean.mul_(0.9)\n", ""),
    "an update of a buffer is another one": (BLOCKS, "alpha=0.1", "alpha=0.2"),
    "a buffer is saved": (BLOCKS, ", persistent=False", ""),
    "a limit is another one": (BLOCKS, "max=3", "max=4"),
    "random numbers are drawn once and read twice": (BLOCKS, "roll(1, dims=[1]) - y", "roll(1, dims=[1]) - 0 * y - y"),
    "a batch norm follows another momentum": (LAST, "nn.BatchNorm1d(8)", "nn.BatchNorm1d(8, momentum=0.2)"),
    "a file is no Python": (LAST, "return early, self.head(x)", "return early, self.head(x"),
    "a module that is not there is constructed": (LAST, "nn.BatchNorm1d(8)", "nn.BatchNorm8d(8)"),
    "a name is not defined": (LAST, "return early, self.head(x)", "return early, self.head(y)"),
}


def test_the_written_package_is_the_model() -> None:
    plan, files = package()
    assert differences_of_text(files, [plan]) == []


def test_there_are_forty_kinds_of_faults() -> None:
    assert len(FAULTS) >= 40


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    plan, files = package()
    file, original, replacement = FAULTS[fault]
    assert original in files[file], f"the source no longer has {original!r}"
    faulty = {**files, file: files[file].replace(original, replacement, 1)}
    difference = differences_of_text(faulty, [plan])[0]
    assert difference.written or difference.captured
    assert difference.names
