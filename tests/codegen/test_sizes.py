"""Stages are the model at every size that it takes: sizes are read from tensors, as the model's source reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from tests.codegen.parity import assert_equal_at_every_size, differences, numbers_in_forwards, source, split
from tests.slow import cases

pytestmark = pytest.mark.usefixtures("from_graph")

BATCH, LENGTH = 3, 13  # primes, which no other number of these models is


class Attention(nn.Module):
    """Attention with a window, heads as many as the batch, and positions."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.heads, self.window = BATCH, window
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def mask(self, length: int) -> Tensor:
        positions = torch.arange(length)
        distance = positions[:, None] - positions[None, :]
        return (distance >= 0) & (distance < (self.window or length))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, features = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, features // self.heads).permute(2, 0, 3, 1, 4)
        mask = self.mask(length)[None, None].expand(batch, 1, length, length)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(attended.transpose(1, 2).reshape(batch, length, features))


@pytest.mark.parametrize("window", cases([None, 16, 5], slow=[16]))
def test_a_mask_is_that_of_the_length_at_hand(window: int | None, tmp_path: Path) -> None:
    """A window of 16 is the causal mask for 13 positions, and not for 40."""
    model = nn.Sequential(*(Attention(window) for _ in range(3)))
    package = split(tmp_path, model, (torch.randn(BATCH, LENGTH, 12),), cut="1,2")
    assert_equal_at_every_size(package, model, (BATCH, LENGTH, 12), (1, 1, 12), (7, 40, 12), (BATCH, BATCH, 12))
    assert LENGTH not in numbers_in_forwards(package)
    assert ("is_causal=True" in source(package)) == (window is None)


@pytest.mark.parametrize("window", [None, 4096])
def test_a_mask_that_is_too_large_to_be_computed_is_known_too(window: int | None, tmp_path: Path) -> None:
    """Its length varies: that it is causal is seen at another one. A window is as wide as it is."""
    model = nn.Sequential(*(Attention(window) for _ in range(2)))
    package = split(tmp_path, model, (torch.empty(BATCH, 10007, 12, device="meta"),), cut="1")
    assert 10007 not in numbers_in_forwards(package)
    assert ("is_causal=True" in source(package)) == (window is None)
    assert (".triu(diagonal=-4095)" in source(package)) == (window is not None)
    assert_equal_at_every_size(package, model, (2, 40, 12))


class LaterTokens(nn.Module):
    """The last position of one text sees all of another one, the one before it all but the last, and so on."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        queries, keys = torch.arange(x.shape[1]), torch.arange(y.shape[1])
        mask = (keys[None, :] - queries[:, None] <= y.shape[1] - x.shape[1])[None, None].expand(x.shape[0], 1, -1, -1)
        return F.scaled_dot_product_attention(x[:, None], y[:, None], y[:, None], attn_mask=mask)[:, 0]


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.head = nn.Linear(8, 8), LaterTokens(), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.attention(self.first(x), y))


@pytest.mark.parametrize("lengths", [(8192, 4096), (13, 13)])
def test_a_mask_of_two_lengths_is_causal_only_where_they_are_equal(lengths: tuple[int, int], tmp_path: Path) -> None:
    model = Reading()
    args = tuple(torch.empty(BATCH, length, 8, device="meta") for length in lengths)
    package = split(tmp_path, model, args, cut="head")
    assert "is_causal=True" not in source(package)
    x, y = torch.randn(2, 5, 8), torch.randn(2, 9, 8)
    stages = [package.load_stage(index) for index in range(2)]
    torch.testing.assert_close(stages[1](stages[0](x, y)), model(x, y))


class Flattened(nn.Module):
    """CompositeWork on [batch · length, features] between its two reshapes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, features = x.shape
        x = self.first(x.reshape(-1, features)).relu()
        x = self.second(x)
        return x.view(batch, length, features).cumsum(1)


def test_a_stage_that_cannot_know_a_size_takes_an_input_that_has_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Flattened())
    package = split(tmp_path, model, (torch.randn(BATCH, LENGTH, 8),), cut="1.second")
    assert package.manifest.stages[1].inputs[0] == package.manifest.args[0]
    assert_equal_at_every_size(package, model, (BATCH, LENGTH, 8), (5, 4, 8))


def test_a_size_that_no_variable_has_any_longer_has_one_of_its_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Flattened(), nn.Linear(8, 8))
    package = split(tmp_path, model, (torch.randn(BATCH, LENGTH, 8),), cut="2")
    assert "input_1 = x.shape[1]\n" in source(package)
    assert_equal_at_every_size(package, model, (BATCH, LENGTH, 8), (5, 4, 8))


class Positions(nn.Module):
    """Is given a length, not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 8))

    def forward(self, length: int) -> Tensor:
        return self.weight[torch.arange(length)] * torch.ones(length, 1).cumsum(0)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.layers = Positions(), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(x.shape[1])
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_module_that_is_given_a_length_reads_it_from_a_tensor(tmp_path: Path) -> None:
    package = split(tmp_path, Embedded(), (torch.randn(BATCH, LENGTH, 8),), cut="layers.1")
    model = Embedded()
    model.load_state_dict({**package.load_stage(0).state_dict(), **package.load_stage(1).state_dict()})
    assert_equal_at_every_size(package, model, (BATCH, LENGTH, 8), (2, 30, 8))


class Pooled(nn.Module):
    """Sizes are quotients of those of the images."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, stride=2, padding=1) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for convolution in self.convolutions:
            x = convolution(x)
            batch, channels, height, width = x.shape
            x = x.view(batch, channels, height * width).softmax(-1).view(batch, channels, height, width)
        return self.head(x.flatten(2).transpose(1, 2))


def test_images_of_other_sizes(tmp_path: Path) -> None:
    model = Pooled()
    package = split(tmp_path, model, (torch.randn(BATCH, 4, 26, 38),), cut="convolutions.1,convolutions.2")
    assert_equal_at_every_size(package, model, (BATCH, 4, 26, 38), (1, 4, 64, 32), (2, 4, 17, 19))
    assert package.manifest.values["images"].shape == ("batch", 4, "images_2", "images_3")


def test_the_manifest_says_what_may_vary(tmp_path: Path) -> None:
    package = split(
        tmp_path, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.randn(BATCH, LENGTH, 8),), cut="1"
    )
    sizes = package.manifest.sizes
    assert {name: size.captured for name, size in sizes.items()} == {"batch": BATCH, "input_1": LENGTH}
    assert package.manifest.values["input"].shape_at({"batch": 2, "input_1": 9}) == (2, 9, 8)


class FewBest(nn.Module):
    """Adds the mean of the largest few values over the length, and gives the end of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.linear = 6, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        best = self.linear(x).topk(min(self.count, x.shape[1]), dim=1).values
        return (x + best.mean(1, keepdim=True))[:, -max(3, x.shape[1] // 2) :]


def test_the_smaller_of_a_number_and_a_size_is_one_expression(tmp_path: Path) -> None:
    model = nn.Sequential(FewBest(), FewBest())
    package = split(tmp_path, model, (torch.randn(BATCH, LENGTH, 8),), cut="1")
    assert_equal_at_every_size(package, model, (BATCH, LENGTH, 8), (5, 40, 8), (BATCH, 6, 8))
    text = source(package)
    assert "topk(min(self.count, x.shape[1]), dim=1)" in text and "-max(3, x.shape[1] // 2) :]" in text
    between = package.manifest.values[package.manifest.stages[0].outputs[0]]
    assert between.shape == ("batch", "max(3, input_1 // 2)", 8)
    assert not any("min(" in condition for condition in package.manifest.conditions)


def test_a_symbolic_size_is_a_number_and_an_expression() -> None:
    captured = pipegraph.capture(nn.Linear(8, 8), (torch.randn(BATCH, LENGTH, 8),))
    batch, length, features = captured.inputs[0].meta["sizes"]
    assert (int(batch), int(length), features) == (BATCH, LENGTH, 8)
    assert batch != BATCH and batch == captured.returned[0].meta["sizes"][0]
    product = batch * length * 2
    assert product == 2 * length * batch and int(product) == 2 * BATCH * LENGTH
    assert product.text == "2 * batch * input_1"


class RelativeShift(nn.Module):
    """Scores by distance, moved so that they stand by position, as Transformer-XL moves them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.place = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(95, 8))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        scores = self.query(x) @ self.place(self.table[48 - length : 47 + length]).T
        rows, queries, distances = scores.shape
        moved = F.pad(scores, (1, 0)).view(rows, distances + 1, queries)[:, 1:].reshape(rows, queries, distances)
        return moved[..., : distances // 2 + 1].softmax(-1)


def test_a_reshape_names_sizes_and_no_divisions_of_them(tmp_path: Path) -> None:
    model = RelativeShift()
    package = split(tmp_path, model, (torch.randn(BATCH, LENGTH, 8),), cut="place")
    assert "//" not in source(package)
    assert_equal_at_every_size(package, model, (BATCH, LENGTH, 8), (2, 5, 8), (4, 40, 8))


class CountsDown(nn.Module):
    """Positions from the last to the first, as Transformer-XL counts them: a step of −1.0 makes floats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        positions = torch.arange(length - 1, -1, -1.0)
        return self.last(self.first(x) * positions[:, None] / length)


def test_a_range_that_counts_down_has_any_length(tmp_path: Path) -> None:
    model = CountsDown()
    package = split(tmp_path, model, (torch.randn(BATCH, LENGTH, 12),), cut="last")
    assert ".shape[1] - 1, -1, step=-1.0" in source(package)
    assert_equal_at_every_size(package, model, (BATCH, LENGTH, 12), (2, 5, 12), (4, 17, 12))


class Patches(nn.Module):
    """Patches of an image, in one expression of which two parts ask for sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.project = 4, nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        size = self.width
        shape = (batch, channels, height // size, size, width // size, size)
        x = x.reshape(shape).permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, size * size * channels)
        return self.project(x)


def test_a_value_that_is_asked_for_a_size_is_computed_once(tmp_path: Path) -> None:
    model = Patches()
    package = split(tmp_path, model, (torch.randn(3, 3, 20, 28),), cut=1)
    assert package.manifest.values["x"].shape == ("batch", 3, "x_2", "x_3")
    assert_equal_at_every_size(package, model, (3, 3, 20, 28), (5, 3, 12, 16))


class TakesAnyName(nn.Module):
    """Passes on what it is given by a name that is not in its signature."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, **named_inputs: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu() + named_inputs["bias"])


def test_sizes_of_inputs_that_no_signature_names_vary(tmp_path: Path) -> None:
    model, inputs = TakesAnyName(), {"bias": torch.randn(BATCH, LENGTH, 8), "x": torch.randn(BATCH, LENGTH, 8)}
    forward = model.forward
    package = split(tmp_path, model, (), inputs, cut="outer")
    assert model.forward == forward and "forward" not in vars(model)
    assert {name: package.manifest.values[name].shape for name in inputs} == dict.fromkeys(
        inputs, ("batch", "bias_1", 8)
    )
    assert differences(package, model, (), inputs) == []
    other_inputs = {name: torch.randn(2, 5, 8) for name in inputs}
    pipe = pipegraph.Pipeline(package, microbatches=1, kernels="autograd")
    torch.testing.assert_close(pipe.eval(**other_inputs), model(**other_inputs))


class Unrolled(nn.Module):
    """Flattens an image, and makes one of it again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows, channels, *spatial = x.shape
        x = x.reshape(rows, channels, -1)
        return (x + self.conv(x)).reshape(rows, channels, *spatial)


class Strided(nn.Module):
    """The sizes of its images follow from those of the input, which no tensor after the first layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 3, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Unrolled()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_size_is_read_whole_where_no_value_has_its_parts(tmp_path: Path) -> None:
    model = Strided()
    package = split(tmp_path, model, (torch.randn(BATCH, 3, 8, 8),), cut="blocks.1.1")
    assert "size = x.shape[3]" in source(package)
    assert differences(package, model, (torch.randn(BATCH, 3, 8, 8),)) == []
    other_input = torch.randn(2, 3, 10, 14)
    pipe = pipegraph.Pipeline(package, microbatches=1, kernels="autograd")
    torch.testing.assert_close(pipe.eval(other_input), model(other_input))


class HalvedPatches(nn.Module):
    """Tokens of an image, and the sizes of the image, as hierarchical transformers of images pass them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, int, int]:
        x = self.conv(x)
        return x.flatten(2).transpose(1, 2), x.shape[2], x.shape[3]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(6, 6), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        image = x.transpose(1, 2).reshape(x.shape[0], -1, height, width)
        return x + self.linear(self.conv(image).flatten(2).transpose(1, 2))


class Hierarchy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.patches = nn.Conv2d(3, 4, 3, stride=2, padding=1), HalvedPatches()
        self.blocks = nn.ModuleList(Mixed() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, height, width = self.patches(self.first(x))
        for block in self.blocks:
            x = block(x, height, width)
        return x.reshape(x.shape[0], height, width, -1)


def test_sizes_follow_from_an_input_that_no_variable_has_any_more(tmp_path: Path) -> None:
    """The second convolution makes the image smaller inside of a module, and the stage needs the width after it."""
    torch.manual_seed(0)
    model, x = Hierarchy(), torch.randn(2, 3, 37, 41)
    package = split(tmp_path, model, (x,), cut="patches")
    assert len(package.manifest.stages[1].inputs) == 1
    assert not differences(package, model, (x,))
    for shape in ((3, 3, 30, 26), (1, 3, 52, 33)):
        assert_equal_at_every_size(package, model, shape)
