"""Sizes that a model fixes, or bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import BatchError
from tests.codegen.parity import assert_equal_at_every_size, numbers_in_forwards, source, split

pytestmark = pytest.mark.usefixtures("from_graph")

BATCH, LENGTH = 3, 13  # primes, which no other number of these models is


class Averaged(nn.Module):
    """Computes a float from a size; the source can only contain this number if the size is fixed."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) / x.shape[1] ** 0.5


def test_a_size_is_fixed_if_a_fraction_follows_from_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Averaged(), nn.Linear(8, 8))
    package = split(tmp_path, model, (torch.randn(BATCH, LENGTH, 8),), cut="2")
    assert package.manifest.values["input"].shape == ("batch", LENGTH, 8)
    assert_equal_at_every_size(package, model, (BATCH, LENGTH, 8), (7, LENGTH, 8))


class Gathered(nn.Module):
    """Looks up positions of its other input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        gathered = self.first(x).gather(1, positions[:, :, None].expand(-1, -1, x.shape[2]))
        return self.second(gathered)


class DividesByWidth(nn.Module):
    """Computes a fraction from the width, which its layer fixes only afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        scale = math.sqrt(2.0) * x.shape[2]
        return self.head(self.body(x) / scale)


def test_a_fraction_of_a_size_that_is_fixed_anyhow_fixes_no_other(tmp_path: Path) -> None:
    model = DividesByWidth()
    package = split(tmp_path, model, (torch.randn(BATCH, LENGTH, 12),), cut="head")
    assert package.manifest.captured_sizes == {"batch": BATCH, "x_1": LENGTH}
    assert_equal_at_every_size(package, model, (BATCH, LENGTH, 12), (5, 7, 12))


def test_positions_in_a_length_that_varies_are_bounded_by_the_length_at_capture(tmp_path: Path) -> None:
    inputs = torch.randn(BATCH, LENGTH, 8), torch.zeros(BATCH, 5, dtype=torch.int64)
    package = split(tmp_path, Gathered(), inputs, cut="second")
    assert package.manifest.values["positions"].bound == LENGTH


class Branches(nn.Module):
    """Takes another branch for other sizes."""

    def __init__(self, condition: Callable[[int, int], bool]) -> None:
        super().__init__()
        self.linear, self.condition = nn.Linear(8, 8), condition
        self.positions = nn.Parameter(torch.randn(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.positions[: x.shape[1]]
        return x.sin() if self.condition(x.shape[0], x.shape[1]) else x.cos()


@pytest.mark.parametrize(
    ("condition", "other", "message"),
    [
        (
            lambda batch, length: length > 8,
            (4, 8),
            "input_1, dimension 1 of input, is 8; the stages are the model for 9 to 64",
        ),
        (lambda batch, length: length % 2 == 1, (4, 12), "the stages are the model where input_1 % 2 == 1"),
        (lambda batch, length: length != 2 * batch, (20, 20), "the stages are the model where input_1 != 2 \\* batch"),
        (
            lambda batch, length: True,
            (4, 65),
            "input_1, dimension 1 of input, is 65; the stages are the model for 1 to 64",
        ),
    ],
)
def test_a_step_of_sizes_for_which_the_model_takes_another_branch_is_refused(
    condition: Callable[[int, int], bool], other: tuple[int, int], message: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Branches(condition))
    package = split(tmp_path, model, (torch.randn(BATCH, LENGTH, 8),), cut="1")
    pipe = pipegraph.Pipeline(package, microbatches=2, kernels="autograd")
    x = torch.randn(8, 15, 8)
    torch.testing.assert_close(pipe.eval(x), model(x))
    with pytest.raises(BatchError, match=message):
        pipe.evaluate(torch.randn(*other, 8))


class Collects(nn.Module):
    """Runs over time steps in Python, which fixes their number, and makes room for the results."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        h = x.new_zeros(rows, width)
        states = x.new_zeros(rows, length, width)
        for step in range(length):
            h = self.cell(x[:, step], h)
            states[:, step] = h
        padded = F.pad(states, (0, 0, 2, 0))[:, :length]
        return padded.reshape(rows * length, width).view(rows, length, -1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Collects(), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_a_length_that_the_model_fixes_is_that_of_an_input(tmp_path: Path) -> None:
    model = Twice()
    package = split(tmp_path, model, (torch.randn(BATCH, LENGTH, 12),), cut="head")
    assert not {BATCH, LENGTH, BATCH * LENGTH} & numbers_in_forwards(package)
    assert "[:, : x.shape[1]]" in source(package)
    assert_equal_at_every_size(package, model, (BATCH, LENGTH, 12), (5, LENGTH, 12))
