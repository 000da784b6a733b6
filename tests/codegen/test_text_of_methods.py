"""Methods that a ``forward`` calls once: their statements stay the author's, but those that no package can have."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.codegen.parity import differences, source, split

INPUTS = (torch.randn(3, 5, 8),)


class Attention(nn.Module):
    """Has its attention in a method, whose heads ranks along `tp` divide."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.dropout = 2, nn.Dropout(0.0)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def attend(self, qkv: Tensor, scale: float) -> Tensor:
        # [rows, length, 3, heads, width]
        qkv = qkv.view(*qkv.shape[:2], 3, self.heads, 4)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)
        scores *= scale  # by the root of the width
        return scores.softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 / math.sqrt(x.shape[-1] // self.heads)
        # one head after the other
        mixed = self.dropout(self.attend(self.qkv(x), scale))
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Sampled(nn.Module):
    """Draws positions with numpy in a method, and changes the shape of a tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = 3
        self.inner = nn.Linear(8, 8)

    def pooled(self, x: Tensor) -> Tensor:
        generator = np.random.default_rng(self.seed)
        positions = torch.tensor(generator.integers(0, 3, size=4))
        # the mean of four positions
        mean = x[:, positions].mean(1)
        mean.unsqueeze_(1)
        return x + mean

    def forward(self, x: Tensor) -> Tensor:
        return self.pooled(self.inner(x))


class Repeated(Sampled):
    """Calls the method in a loop, and in two places."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.pooled(x).tanh()
        return self.inner(self.pooled(x))


class OpenWidth(nn.Module):
    """Attention that may have a context."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.query, self.key = 2, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        rows, length = x.shape[:2]
        q = self.query(x).view(rows, length, self.heads, -1).transpose(1, 2)
        k = self.key(context).view(rows, length, self.heads, -1).transpose(1, 2)
        return (q @ k.transpose(-2, -1) @ k).transpose(1, 2).flatten(2)


SHORTHAND = """
from torch import nn


class Shorthand(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        if x.shape[-1] != 8: raise ValueError(x.shape)
        for layer in self.layers: x = layer(x).relu()
        # twice
        return x + x
"""


def text_of(folder: Path, block: type[nn.Module]) -> str:
    model = nn.Sequential(block(), nn.Linear(8, 8), block())
    package = split(folder, model, INPUTS, cut="1")
    assert differences(package, model, INPUTS) == []
    stages = [package.load_stage(index) for index in range(len(package.manifest.stages))]
    x = expected = torch.randn(2, 7, 8)  # of other sizes than the example
    for stage in stages:
        x = stage(x)
    torch.testing.assert_close(x, model(expected))
    return source(package)


def test_a_statement_that_names_a_number_of_heads_is_written_from_the_graph_alone(tmp_path: Path) -> None:
    assert """
    def forward(self, x: Tensor) -> Tensor:
        scale = 1 / math.sqrt(x.shape[-1] // self.heads)
        # one head after the other
        mixed = self.dropout(self.attend(self.qkv(x), scale))
        return x + self.out(mixed.transpose(1, 2).flatten(2))

    def attend(self, qkv: Tensor, scale: float) -> Tensor:
        # [rows, length, 3, heads, width]
        qkv = qkv.unflatten(-1, (-1, 2, 4))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)
        scores *= scale  # by the root of the width
        return scores.softmax(-1) @ v
""" in text_of(tmp_path, Attention)


def test_a_width_that_the_author_leaves_open_stays_open(tmp_path: Path) -> None:
    """Written from the graph, the statement would name the number of heads as well, and read `context`."""
    text = text_of(tmp_path, OpenWidth)
    assert "        context = x if context is None else context\n" in text
    assert "        q = self.query(x).view(rows, length, self.heads, -1).transpose(1, 2)\n" in text


def test_what_numpy_draws_is_a_constant_between_statements_of_the_author(tmp_path: Path) -> None:
    text = text_of(tmp_path, Sampled)
    assert "np." not in text and "generator" not in text
    assert "        return self.pooled(self.inner(x))\n" in text
    assert (
        """
        # the mean of four positions
        mean = x[:, positions].mean(1)
        mean.unsqueeze_(1)
        return x + mean
"""
        in text
    )


def test_a_method_that_runs_several_times_is_written_from_the_graph_where_it_is_called(tmp_path: Path) -> None:
    text = text_of(tmp_path, Repeated)
    assert "def pooled" not in text
    assert ".tanh()" in text


def test_bodies_on_the_lines_of_their_headers_have_lines_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shorthand_source.py").write_text(SHORTHAND)
    monkeypatch.syspath_prepend(tmp_path)
    text = text_of(tmp_path, importlib.import_module("shorthand_source").Shorthand)
    assert (
        """
        for layer in self.layers:
            x = layer(x).relu()
"""
        in text
    )
    assert "        # twice\n        return x + x\n" in text
    assert "raise" not in text


def test_a_branch_with_an_else_on_lines_of_headers_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    branches = "if self.training: y = x + x\n        else: y = 3 * x\n        # end\n        return y"
    (tmp_path / "branches_source.py").write_text(SHORTHAND.replace("# twice\n        return x + x", branches))
    monkeypatch.syspath_prepend(tmp_path)
    model = nn.Sequential(importlib.import_module("branches_source").Shorthand(), nn.Linear(8, 8))
    package = split(tmp_path, model, INPUTS, cut="1")
    assert "        # end\n        return y\n" in source(package)
    first, second = (package.load_stage(index) for index in range(2))
    for train in (True, False):
        x = torch.randn(2, 7, 8)
        torch.testing.assert_close(second.train(train)(first.train(train)(x)), model.train(train)(x))
